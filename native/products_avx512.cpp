// Products for processors with AVX512.
#include "products_here.h"

namespace netweight {

#if defined(__AVX512VL__)
const Products* avx512_products() {
  static const Products set = {"avx512", decode_fixed_here, multiply_here};
  static const bool usable = __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  return usable ? &set : nullptr;
}
#else
const Products* avx512_products() { return nullptr; }
#endif

}  // namespace netweight
