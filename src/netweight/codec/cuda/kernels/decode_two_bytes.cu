// Decodes blobs whose numbers have two bytes, bf16 and fp16, to addresses that 4 divides: the same code, in which all that
// follows from this is known when it is compiled, and the loop over rows is not a function of its own.
#define NETWEIGHT_NUMBER_BYTES 2
#include "decode_chunks.cuh"
