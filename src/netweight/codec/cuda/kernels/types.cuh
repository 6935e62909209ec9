// What every kernel shares: fixed-width integers and reading little-endian numbers from any address.
//
// Kernels are compiled by NVRTC without any standard header, and by g++ for the CPU in the tests (the emulator there
// defines NETWEIGHT_EMULATED before it includes them). Whatever more than one .cu file needs is to stand here or in a
// .cuh file of its own; a .cu file is included by nobody.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef signed char i8;
typedef short i16;
typedef int i32;
typedef long long i64;

#define NETWEIGHT_DEVICE static __device__ __forceinline__
#define NETWEIGHT_CALLED static __device__ __noinline__  // large and rarely entered: keeps code small and compiling fast

constexpr u32 kWarp = 32;
constexpr u32 kAllLanes = 0xffffffffu;
constexpr u32 kNoSuchRow = 2048;  // in a status, beside the reasons of chunk.cuh: a row was asked for that a weight lacks

// ---- little-endian numbers at addresses of any alignment -------------------------------------------------------------

NETWEIGHT_DEVICE u32 read_u16(const u8* p) { return p[0] | static_cast<u32>(p[1]) << 8; }
NETWEIGHT_DEVICE u32 read_u24(const u8* p) { return read_u16(p) | static_cast<u32>(p[2]) << 16; }
NETWEIGHT_DEVICE u32 read_u32(const u8* p) { return read_u16(p) | read_u16(p + 2) << 16; }
NETWEIGHT_DEVICE void write_u16(u8* p, u32 value) {
  p[0] = static_cast<u8>(value);
  p[1] = static_cast<u8>(value >> 8);
}

// Bytes from `p` to the next address that `alignment`, a power of two, divides; 0 if p is one.
NETWEIGHT_DEVICE u32 bytes_to_alignment(const void* p, u32 alignment) {
  return static_cast<u32>(0 - reinterpret_cast<u64>(p)) & (alignment - 1);
}

// ---- places of the calling thread ------------------------------------------------------------------------------------

NETWEIGHT_DEVICE u32 lane_id() { return threadIdx.x & (kWarp - 1); }
NETWEIGHT_DEVICE u32 warp_id() { return threadIdx.x / kWarp; }
NETWEIGHT_DEVICE u32 lanes_below() { return (1u << lane_id()) - 1; }  // mask of the warp's lanes before this one
