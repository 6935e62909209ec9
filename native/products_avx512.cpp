// Products for processors with AVX-512.
#include "products.h"

#if defined(__AVX512VL__)
#include "products_here.h"

namespace netweight {

const Products* avx512_products() {
  static const Products set = {"avx512", decode_fixed_here, multiply_here};
  static const bool usable = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return usable ? &set : nullptr;
}

}  // namespace netweight
#else
namespace netweight {
const Products* avx512_products() { return nullptr; }
}  // namespace netweight
#endif
