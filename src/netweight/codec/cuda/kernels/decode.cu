// Decodes blobs whose numbers have any size.
#include "decode_chunks.cuh"
