// Products for processors with AVX2.
#include "products.h"

#if defined(__AVX2__)
#include "products_here.h"

namespace netweight {

const Products* avx2_products() {
  static const Products set = {"avx2", decode_fixed_here, encode_fixed_here, multiply_here, nullptr};
  static const bool usable = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  return usable ? &set : nullptr;
}

}  // namespace netweight
#else
namespace netweight {
const Products* avx2_products() { return nullptr; }
}  // namespace netweight
#endif
