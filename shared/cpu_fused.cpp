// The small operations of a decoder layer: one pass over memory instead of one for each arithmetic step.
//
// The intermediate roundings are those of the plain model, so that both give the same tokens.
#include "cpu_numbers.h"

constexpr Index ALONE = 32768;  // so many numbers are done before a second thread has woken up

template <class T> float inverse_rms(const T* x, Index size, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (Index i = 0; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
  return 1.0f / std::sqrt(sum / float(size) + eps);
}

// x [rows, size] += delta, if there is one; out = RMSNorm(x) * weight.
template <class T>
void add_rms_norm(T* x, const T* delta, const T* weight, T* out, Index rows, Index size, float eps) {
#pragma omp parallel for if (rows * size > ALONE)
  for (Index row = 0; row < rows; ++row) {
    T *own = x + row * size, *result = out + row * size;
    if (delta)
      for (Index i = 0; i < size; ++i) own[i] = narrow<T>(widen(own[i]) + widen(delta[row * size + i]));
    float scale = inverse_rms(own, size, eps);
    for (Index i = 0; i < size; ++i) result[i] = narrow<T>(widen(weight[i]) * rounded<T>(widen(own[i]) * scale));
  }
}

// One head of one token: optional RMSNorm by `weight`, then the rotation by cos and sin [head_dim].
template <class T>
void turn(T* head, const T* weight, const float* cos, const float* sin, Index head_dim, float eps) {
  Index half = head_dim / 2;
  if (weight) {
    float scale = inverse_rms(head, head_dim, eps);
    for (Index i = 0; i < head_dim; ++i)
      head[i] = narrow<T>(widen(weight[i]) * rounded<T>(widen(head[i]) * scale));
  }
  for (Index i = 0; i < half; ++i) {
    float first = widen(head[i]), second = widen(head[i + half]);
    head[i] = narrow<T>(first * cos[i] - second * sin[i]);
    head[i + half] = narrow<T>(second * cos[i + half] + first * sin[i + half]);
  }
}

// qkv [tokens, heads + 2 * kv_heads, head_dim]: turn the queries and keys in place.
template <class T>
void rotary(T* qkv, const T* q_weight, const T* k_weight, const float* cos, const float* sin, Index tokens,
            Index heads, Index kv_heads, Index head_dim, float eps) {
#pragma omp parallel for if (tokens * (heads + kv_heads) * head_dim > ALONE)
  for (Index t = 0; t < tokens; ++t)
    for (Index h = 0; h < heads + kv_heads; ++h)
      turn(qkv + (t * (heads + 2 * kv_heads) + h) * head_dim, h < heads ? q_weight : k_weight,
           cos + t * head_dim, sin + t * head_dim, head_dim, eps);
}

// gate_up [rows, 2 * size] -> out [rows, size] = silu(gate) * up.
template <class T> void swiglu(const T* gate_up, T* out, Index rows, Index size) {
#pragma omp parallel for if (rows * size > ALONE)
  for (Index row = 0; row < rows; ++row) {
    const T *gate = gate_up + row * 2 * size, *up = gate + size;
    for (Index i = 0; i < size; ++i) {
      float x = widen(gate[i]);
      out[row * size + i] = narrow<T>(rounded<T>(x / (1.0f + exponential(-x))) * widen(up[i]));
    }
  }
}

// What Python calls: each operation for both types.
#define EXPORT(T, suffix)                                                                                           \
  extern "C" void add_rms_norm_##suffix(T* x, const T* delta, const T* weight, T* out, Index rows, Index size,     \
                                        float eps) { add_rms_norm(x, delta, weight, out, rows, size, eps); }       \
  extern "C" void rotary_##suffix(T* qkv, const T* q_weight, const T* k_weight, const float* cos,                  \
                                  const float* sin, Index tokens, Index heads, Index kv_heads, Index head_dim,     \
                                  float eps) {                                                                      \
    rotary(qkv, q_weight, k_weight, cos, sin, tokens, heads, kv_heads, head_dim, eps); }                           \
  extern "C" void swiglu_##suffix(const T* gate_up, T* out, Index rows, Index size) {                               \
    swiglu(gate_up, out, rows, size); }

EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)
