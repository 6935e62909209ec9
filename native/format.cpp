// The table of element types.
#include "format.h"

namespace netweight {

const std::vector<Dtype>& all_dtypes() {
  static const std::vector<Dtype> table = {
      {1, "BOOL", 8, 1, 0, 0},        {2, "U8", 8, 1, 0, 0},           {3, "I8", 8, 1, 0, 0},
      {4, "F8_E5M2", 8, 1, 5, 2},     {5, "F8_E4M3", 8, 1, 4, 3},      {6, "F8_E8M0", 8, 1, 0, 0},
      {7, "F8_E4M3FNUZ", 8, 1, 4, 3}, {8, "F8_E5M2FNUZ", 8, 1, 5, 2},  {9, "I16", 16, 2, 0, 0},
      {10, "U16", 16, 2, 0, 0},       {11, "F16", 16, 2, 5, 10},       {12, "BF16", 16, 2, 8, 7},
      {13, "I32", 32, 4, 0, 0},       {14, "U32", 32, 4, 0, 0},        {15, "F32", 32, 4, 8, 23},
      {16, "F64", 64, 8, 11, 52},     {17, "I64", 64, 8, 0, 0},        {18, "U64", 64, 8, 0, 0},
      {19, "C64", 64, 4, 8, 23},      {20, "C128", 128, 8, 11, 52},    {21, "C32", 32, 2, 5, 10},
      {22, "F4", 4, 1, 0, 0},         {23, "F6_E2M3", 6, 1, 0, 0},     {24, "F6_E3M2", 6, 1, 0, 0},
  };
  return table;
}

const Dtype& dtype_by_code(u8 code) {
  for (const Dtype& d : all_dtypes())
    if (d.code == code) return d;
  throw UnsupportedError("element type number " + std::to_string(code) + " is not known to this release");
}

const Dtype& dtype_by_name(const char* name) {
  for (const Dtype& d : all_dtypes())
    if (std::strcmp(d.name, name) == 0) return d;
  throw UnsupportedError(std::string("element type ") + name + " is not known to this release");
}

}  // namespace netweight
