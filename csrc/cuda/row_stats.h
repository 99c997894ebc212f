// The numbers of a row that is measured: what the 32 threads of a warp make of it, each of which has updated four
// elements. The order of additions is that of docs/ops.md.
//
// V is a value that each thread of a warp has, and Bits a whole one: on a GPU a float and a uint32_t, and `InWarp` has
// what threads do together. Tests put the values of 32 threads into one struct, and run the same functions on a
// processor.
#pragma once

#include "../rules/rule.h"

namespace zero_kernels {

// Thread t has elements 4t ... 4t + 3 of the row.
template <class V, class Bits>
struct RowTerms {
  V g[4], u[4], p[4];   // squares
  Bits largest, zeros;  // of the thread: the bits of its largest |u|, and how many of its gradients are 0
};

template <class V, class Bits>
struct RowNumbers {
  V g, u, p;
  Bits largest, zeros;
};

// Line t / 4 has a thread's elements, in columns 4 (t % 4) ... + 3. `other(x, bit)` is the x of the thread whose number
// differs in that bit, and `pick(bit, a, b)` is b where the thread's own number has it, else a. As long as threads have
// several columns, each of two keeps half of them and gives the other half away.
template <class Warp, class V>
ZK_HOST_DEVICE inline V row_sum(const V (&x)[4]) {
  V a = Warp::pick(4, x[0], x[2]) + Warp::other(Warp::pick(4, x[2], x[0]), 4);  // lines in pairs
  V b = Warp::pick(4, x[1], x[3]) + Warp::other(Warp::pick(4, x[3], x[1]), 4);
  V sum = Warp::pick(8, a, b) + Warp::other(Warp::pick(8, b, a), 8);  // pairs of these
  sum = sum + Warp::other(sum, 16);                                   // one line
  sum = sum + Warp::other(sum, 2);                                    // columns j and j + 8
  sum = sum + Warp::other(sum, 1);                                    // j and j + 4
  sum = sum + Warp::other(sum, 4);                                    // j and j + 2
  return sum + Warp::other(sum, 8);
}

template <class Warp, class V, class Bits>
ZK_HOST_DEVICE inline RowNumbers<V, Bits> row_numbers(const RowTerms<V, Bits>& terms) {
  return {
      row_sum<Warp>(terms.g), row_sum<Warp>(terms.u), row_sum<Warp>(terms.p), Warp::largest(terms.largest),
      Warp::sum(terms.zeros)};
}

// Rows that are not updated have zeros.
ZK_HOST_DEVICE inline void store_row_stats(float* to, bool live, const RowNumbers<float, uint32_t>& numbers) {
  to[0] = live ? numbers.g : 0.0f;
  to[1] = live ? numbers.u : 0.0f;
  to[2] = live ? numbers.p : 0.0f;
  to[3] = live ? bits_float(numbers.largest) : 0.0f;
  to[4] = live ? float(numbers.zeros) : 0.0f;
}

#if defined(__CUDACC__)

struct InWarp {
  __device__ static float pick(unsigned bit, float a, float b) { return threadIdx.x & bit ? b : a; }
  __device__ static float other(float x, int bit) { return __shfl_xor_sync(0xffffffff, x, bit); }
  __device__ static uint32_t largest(uint32_t x) { return __reduce_max_sync(0xffffffff, x); }
  __device__ static uint32_t sum(uint32_t x) { return __reduce_add_sync(0xffffffff, x); }
};

#endif

}  // namespace zero_kernels
