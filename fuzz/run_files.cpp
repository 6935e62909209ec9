// Runs the fuzzing target on files, where there is no libFuzzer, as under an emulator of another processor; or repeats one
// work, so that its instructions can be counted.
//   run_files FILE...                              blobs; those without a base must decode to the bytes whose digest they have
//   run_files decode|encode PATH REPEATS FILE
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <string>

#include "blob.h"

using namespace netweight;

extern "C" int LLVMFuzzerTestOneInput(const u8* data, size_t size);

namespace {

std::vector<u8> contents(const char* path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::vector<u8> decoded(std::span<const u8> blob, const BlobHeader& h, const Kernels& kernels) {
  std::vector<u8> out(static_cast<size_t>(h.nbytes));
  decode_range(blob, h, 0, h.numbers, nullptr, true, 1, kernels, out.data());
  return out;
}

void repeat(const std::string& what, const Kernels& kernels, int repeats, std::span<const u8> blob) {
  const BlobHeader h = read_header(blob);
  std::vector<u8> tensor = decoded(blob, h, kernels), out(encode_bound(*h.dtype, h.shape, h.chunk_log2));
  for (int i = 0; i < repeats; i++) {
    if (what == "decode") decode_range(blob, h, 0, h.numbers, nullptr, false, 1, kernels, tensor.data());
    else encode(tensor, *h.dtype, h.shape, {h.level, h.chunk_log2, false, nullptr}, 1, kernels, out.data());
  }
}

}  // namespace

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  if (what == "decode" || what == "encode") {
    repeat(what, kernels_by_name(arguments[2]), std::atoi(arguments[3]), contents(arguments[4]));
    return 0;
  }
  for (int i = 1; i < count; i++) {
    std::vector<u8> input = contents(arguments[i]);
    const BlobHeader h = read_header(input);
    for (const Kernels* kernels : usable_kernels())
      if (!h.has_base) decoded(input, h, *kernels);
    input.insert(input.begin(), 0);
    for (int how : {0x00, 0x56, 0xfa}) {  // whole blobs with parts of three lengths
      input[0] = static_cast<u8>(how);
      LLVMFuzzerTestOneInput(input.data(), input.size());
    }
  }
  std::printf("%d files, alike by", count - 1);
  for (const Kernels* kernels : usable_kernels()) std::printf(" %s", kernels->name);
  std::printf("\n");
  return 0;
}
