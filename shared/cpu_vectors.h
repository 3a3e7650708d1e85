// Vectors of sums as wide as the processor's, and how the stored numbers are multiplied into them.
#pragma once
#include <utility>

#include "cpu_numbers.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

#define UNROLLED _Pragma("GCC unroll 16")  // so that an array of sums can live in registers

#if defined(__AVX512F__)
constexpr Index LANES = 16, SUMS_AT_HAND = 16;  // vectors of sums that stay in registers
#elif defined(__AVX__)
constexpr Index LANES = 8, SUMS_AT_HAND = 8;
#else
constexpr Index LANES = 4, SUMS_AT_HAND = 16;
#endif

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t WideBits __attribute__((vector_size(LANES * 4)));
typedef std::uint16_t Bits __attribute__((vector_size(LANES * 2)));

inline Vector load(const float* x) {
  Vector result;
  std::memcpy(&result, x, sizeof result);
  return result;
}
inline Vector load(const bfloat16* x) {
  Bits bits;
  std::memcpy(&bits, x, sizeof bits);
  WideBits wide = __builtin_convertvector(bits, WideBits) << 16;
  Vector result;
  std::memcpy(&result, &wide, sizeof result);
  return result;
}

inline void store(const Vector& x, float* place) { std::memcpy(place, &x, sizeof x); }
inline void store(const Vector& x, bfloat16* place) {
#ifdef __AVX512BF16__
  __m256bh narrowed = _mm512_cvtneps_pbh((__m512)x);
  std::memcpy(place, &narrowed, sizeof narrowed);
#else
  for (Index i = 0; i < LANES; ++i) place[i] = narrow<bfloat16>(x[i]);
#endif
}

// As if it had been stored as bfloat16 and loaded again.
inline Vector rounded(const Vector& x) {
  bfloat16 narrowed[LANES];
  store(x, narrowed);
  return load(narrowed);
}

inline Vector larger(Vector x, Vector y) { return x > y ? x : y; }
// All lanes joined to one number, half and half.
template <class Join> float joined(const Vector& x, Join join) {
  float lanes[LANES];
  store(x, lanes);
  for (Index width = LANES / 2; width; width /= 2)
    for (Index i = 0; i < width; ++i) lanes[i] = join(lanes[i], lanes[i + width]);
  return lanes[0];
}
inline float maximum(const Vector& x) { return joined(x, [](float a, float b) { return std::max(a, b); }); }
inline float sum(const Vector& x) { return joined(x, [](float a, float b) { return a + b; }); }

inline Vector exponential(Vector x) {
  Vector result;
  for (Index i = 0; i < LANES; ++i) result[i] = exponential(x[i]);
  return result;
}

// Runs of SPAN lanes, of x and of y in turn: their first runs plus their second ones.
template <Index SPAN> constexpr int first_run(Index lane) {
  return int(lane - lane % (2 * SPAN) + lane % SPAN + (lane % (2 * SPAN) < SPAN ? 0 : LANES));
}
template <Index SPAN, Index... LANE> Vector added(Vector x, Vector y, std::integer_sequence<Index, LANE...>) {
  return __builtin_shufflevector(x, y, first_run<SPAN>(LANE)...) +
         __builtin_shufflevector(x, y, (first_run<SPAN>(LANE) + int(SPAN))...);
}

// Lane i of the result is the sum over the lanes of x[i].
template <Index SPAN = LANES / 2> Vector sums_of(Vector x[LANES]) {
  for (Index i = 0; i < SPAN; ++i) x[i] = added<SPAN>(x[i], x[i + SPAN], std::make_integer_sequence<Index, LANES>());
  if constexpr (SPAN == 1) return x[0];
  else return sums_of<SPAN / 2>(x);
}

// SIZE numbers of T side by side. STEP of them make one product: a pair where the processor multiplies pairs.
template <class T> struct Lanes {
  static constexpr Index SIZE = LANES, STEP = 1;
  using Type = Vector;
  using Weight = float;

  static Type load(const T* x, Index) { return ::load(x); }
  static void add_products(Vector& sums, Type x, Type y) { sums += x * y; }
  static Type splat(const Weight* weight) { return Vector{} + *weight; }
  static void spread(const T* const* rows, Index from, Index, Type* result) { *result = ::load(*rows + from); }
  static Index place(Index i) { return i; }
};

#ifdef __AVX512BF16__
template <> struct Lanes<bfloat16> {
  static constexpr Index SIZE = 2 * LANES, STEP = 2;
  using Type = __m512i;
  using Weight = bfloat16;

  static Type load(const bfloat16* x, Index left) {
    return left >= SIZE ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16((1u << left) - 1, x);
  }
  static void add_products(Vector& sums, Type x, Type y) {
    sums = (Vector)_mm512_dpbf16_ps((__m512)sums, (__m512bh)x, (__m512bh)y);
  }
  static Type splat(const Weight* pair) {
    std::int32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
    return _mm512_set1_epi32(bits);
  }
  // The numbers of two rows in turn: pairs for the lower and for the upper four of every eight.
  static void spread(const bfloat16* const* rows, Index from, Index left, Type* result) {
    Type first = load(rows[0] + from, left), second = load(rows[1] + from, left);
    result[0] = _mm512_unpacklo_epi16(first, second), result[1] = _mm512_unpackhi_epi16(first, second);
  }
  static Index place(Index i) { return i / 32 * 32 + i % 16 / 4 * 8 + i / 16 % 2 * 4 + i % 4; }
};
#endif
