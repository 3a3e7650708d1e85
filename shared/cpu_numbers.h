// The numbers that the CPU kernels work with, for any CPU.
//
// T is the type of what is stored: float or bfloat16. Sizes and strides count elements, not bytes. Sums are kept
// in float32. The loops are plain; the compiler turns them into whatever vectors the machine has.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

using Index = std::int64_t;

// bfloat16 is the upper half of a float32.
struct bfloat16 { std::uint16_t bits; };

inline float widen(float x) { return x; }
inline float widen(bfloat16 x) {
  std::uint32_t bits = std::uint32_t(x.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}

template <class T> T narrow(float x);
template <> inline float narrow<float>(float x) { return x; }
template <> inline bfloat16 narrow<bfloat16>(float x) {  // to the nearest, ties to the even one
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  std::uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {std::uint16_t((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : rounded)};  // a NaN stays one
}
template <class T> float rounded(float x) { return widen(narrow<T>(x)); }

// e^x for x <= 0 or moderate x, in a form that vectorises: 2^whole by exponent bits, 2^rest by a polynomial.
inline float exponential(float x) {
  float power = std::min(std::max(x, -87.0f), 87.0f) * 1.44269504f;
  float whole = std::nearbyint(power), rest = (power - whole) * 0.69314718f;
  float series = 1.0f + rest * (1.0f + rest * (0.5f + rest * (0.16666667f + rest * (0.041666667f +
                 rest * (0.0083333333f + rest * 0.0013888889f)))));
  std::int32_t bits = (std::int32_t(whole) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, sizeof scale);
  return x < -87.0f ? 0.0f : series * scale;
}
