// The small operations of a decoder layer, and attention over cache slots, for any CPU.
//
// Plain loops that the compiler turns into whatever vectors the machine has; every sum is kept in float32.
// T is the type of what is stored: float or bfloat16. Sizes and strides count elements, not bytes.
// The intermediate roundings are those of the plain model, so that both give the same tokens.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

using Index = std::int64_t;

// ---- Numbers: bfloat16 is the upper half of a float32 ----

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
  std::uint16_t rounded = std::uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
  return {x != x ? std::uint16_t(0x7fc0) : rounded};
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

// ---- Fused small operations: one pass over memory instead of one for each arithmetic step ----

template <class T> float inverse_rms(const T* x, Index size, float eps) {
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (Index i = 0; i < size; ++i) sum += widen(x[i]) * widen(x[i]);
  return 1.0f / std::sqrt(sum / float(size) + eps);
}

// x [rows, size] += delta, if there is one; out = RMSNorm(x) * weight.
template <class T>
void add_rms_norm(T* x, const T* delta, const T* weight, T* out, Index rows, Index size, float eps) {
#pragma omp parallel for if (rows > 8)
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
#pragma omp parallel for if (tokens > 8)
  for (Index t = 0; t < tokens; ++t)
    for (Index h = 0; h < heads + kv_heads; ++h)
      turn(qkv + (t * (heads + 2 * kv_heads) + h) * head_dim, h < heads ? q_weight : k_weight,
           cos + t * head_dim, sin + t * head_dim, head_dim, eps);
}

// gate_up [rows, 2 * size] -> out [rows, size] = silu(gate) * up.
template <class T> void swiglu(const T* gate_up, T* out, Index rows, Index size) {
#pragma omp parallel for if (rows > 8)
  for (Index row = 0; row < rows; ++row) {
    const T *gate = gate_up + row * 2 * size, *up = gate + size;
    for (Index i = 0; i < size; ++i) {
      float x = widen(gate[i]);
      out[row * size + i] = narrow<T>(rounded<T>(x / (1.0f + exponential(-x))) * widen(up[i]));
    }
  }
}

// ---- Attention over the cache in place ----

constexpr Index KEYS = 64;    // keys of one tile
constexpr Index TOKENS = 16;  // queries of one tile, each with all heads that share a key-value head
constexpr Index WIDEST = 256;  // the largest head_dim

// One layer of the cache and the step's block tables: where the keys and values of each request lie.
template <class T> struct Cache {
  const T *keys, *values;  // [slots, kv_heads, head_dim]
  const Index* block_tables;  // [requests, table_width]
  Index table_width, block_size, kv_heads, head_dim;
};

// A few neighbouring queries of one request, and one key-value head.
struct Tile { Index request, first_token, num_tokens, first_position, kv_head; };

// Softmax computed as the keys come by (Milakov and Gimelshein, 2018): rows hold their maximum and sum so far.
template <class T> class RunningAttention {
 public:
  RunningAttention(Index rows, Index head_dim)
      : rows(rows), dim(head_dim), queries(rows * dim), sums(rows * dim), scores(rows * KEYS), tile(KEYS * dim),
        maxima(rows, -std::numeric_limits<float>::infinity()), totals(rows) {}

  void set_query(Index row, const T* q, float scale) {
    for (Index i = 0; i < dim; ++i) queries[row * dim + i] = widen(q[i]) * scale;
  }

  // Keys `first` to `first + count` of the request; row r may see those below limits[r].
  void add_keys(const T* const* keys, const T* const* values, Index first, Index count, const Index* limits) {
    load(keys, count);
    for (Index row = 0; row < rows; ++row) score(row, std::min(count, limits[row] - first));
    load(values, count);
    for (Index row = 0; row < rows; ++row) add_values(row, std::min(count, limits[row] - first));
  }

  void result(Index row, T* out) const {
    for (Index i = 0; i < dim; ++i) out[i] = narrow<T>(sums[row * dim + i] / totals[row]);
  }

 private:
  void load(const T* const* vectors, Index count) {
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < dim; ++i) tile[j * dim + i] = widen(vectors[j][i]);
  }

  void score(Index row, Index count) {
    if (count <= 0) return;
    const float* query = &queries[row * dim];
    float *own = &scores[row * KEYS], best = maxima[row];
    for (Index j = 0; j < count; ++j) {
      const float* key = &tile[j * dim];
      float sum = 0;
#pragma omp simd reduction(+ : sum)
      for (Index i = 0; i < dim; ++i) sum += query[i] * key[i];
      own[j] = sum;
    }
    for (Index j = 0; j < count; ++j) best = std::max(best, own[j]);
    float total = 0, shrink = exponential(maxima[row] - best);
#pragma omp simd reduction(+ : total)
    for (Index j = 0; j < count; ++j) total += own[j] = exponential(own[j] - best);
    for (Index i = 0; i < dim; ++i) sums[row * dim + i] *= shrink;
    totals[row] = totals[row] * shrink + total;
    maxima[row] = best;
  }

  void add_values(Index row, Index count) {
    float *sum = &sums[row * dim], partial[WIDEST];
    std::copy(sum, sum + dim, partial);
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < dim; ++i) partial[i] += scores[row * KEYS + j] * tile[j * dim + i];
    std::copy(partial, partial + dim, sum);
  }

  Index rows, dim;
  std::vector<float> queries, sums, scores, tile, maxima, totals;
};

// q and out [tokens, heads, head_dim]; q may be a part of longer rows, q_stride elements apart.
template <class T>
void attend(const Tile& own, const Cache<T>& cache, const T* q, Index q_stride, T* out, Index heads, float scale) {
  Index group = heads / cache.kv_heads, rows = own.num_tokens * group, dim = cache.head_dim;
  RunningAttention<T> attention(rows, dim);
  std::vector<Index> limits(rows);
  for (Index row = 0; row < rows; ++row) {
    Index token = own.first_token + row / group, head = own.kv_head * group + row % group;
    attention.set_query(row, q + token * q_stride + head * dim, scale);
    limits[row] = own.first_position + row / group + 1;
  }
  const Index *block = cache.block_tables + own.request * cache.table_width;
  const T *keys[KEYS], *values[KEYS];
  for (Index first = 0, inside = 0, end = limits.back(); first < end; first += KEYS) {
    Index count = std::min(KEYS, end - first);
    for (Index j = 0; j < count; ++j) {
      Index at = ((*block * cache.block_size + inside) * cache.kv_heads + own.kv_head) * dim;
      keys[j] = cache.keys + at, values[j] = cache.values + at;
      if (++inside == cache.block_size) inside = 0, ++block;
    }
    attention.add_keys(keys, values, first, count, limits.data());
  }
  for (Index row = 0; row < rows; ++row) {
    Index token = own.first_token + row / group, head = own.kv_head * group + row % group;
    attention.result(row, out + (token * heads + head) * dim);
  }
}

std::vector<Tile> tiles_of(const Index* query_start_loc, const Index* seq_lens, Index requests, Index kv_heads) {
  std::vector<Tile> tiles;
  for (Index r = 0; r < requests; ++r) {
    Index start = query_start_loc[r], end = query_start_loc[r + 1];
    for (Index t = start; t < end; t += TOKENS)
      for (Index h = 0; h < kv_heads; ++h)
        tiles.push_back({r, t, std::min(TOKENS, end - t), seq_lens[r] - end + t, h});
  }
  return tiles;
}

template <class T>
void paged_attention(const T* q, Index q_stride, const T* k, Index k_stride, const T* v, Index v_stride, T* out,
                     T* keys, T* values, const Index* slots, const Index* block_tables, Index table_width,
                     Index block_size, const Index* query_start_loc, const Index* seq_lens, Index requests,
                     Index heads, Index kv_heads, Index head_dim, float scale) {
  Index tokens = query_start_loc[requests], size = kv_heads * head_dim;
  std::vector<Tile> tiles = tiles_of(query_start_loc, seq_lens, requests, kv_heads);
  Cache<T> cache{keys, values, block_tables, table_width, block_size, kv_heads, head_dim};
#pragma omp parallel
  {
#pragma omp for
    for (Index t = 0; t < tokens; ++t) {
      std::copy(k + t * k_stride, k + t * k_stride + size, keys + slots[t] * size);
      std::copy(v + t * v_stride, v + t * v_stride + size, values + slots[t] * size);
    }
#pragma omp for schedule(dynamic)
    for (Index i = 0; i < Index(tiles.size()); ++i) attend(tiles[i], cache, q, q_stride, out, heads, scale);
  }
}

// ---- What Python calls: each operation for both types ----

#define EXPORT(T, suffix)                                                                                           \
  extern "C" void add_rms_norm_##suffix(T* x, const T* delta, const T* weight, T* out, Index rows, Index size,     \
                                        float eps) { add_rms_norm(x, delta, weight, out, rows, size, eps); }       \
  extern "C" void rotary_##suffix(T* qkv, const T* q_weight, const T* k_weight, const float* cos,                  \
                                  const float* sin, Index tokens, Index heads, Index kv_heads, Index head_dim,     \
                                  float eps) {                                                                      \
    rotary(qkv, q_weight, k_weight, cos, sin, tokens, heads, kv_heads, head_dim, eps); }                           \
  extern "C" void swiglu_##suffix(const T* gate_up, T* out, Index rows, Index size) {                               \
    swiglu(gate_up, out, rows, size); }                                                                             \
  extern "C" void paged_attention_##suffix(                                                                         \
      const T* q, Index q_stride, const T* k, Index k_stride, const T* v, Index v_stride, T* out, T* keys,          \
      T* values, const Index* slots, const Index* block_tables, Index table_width, Index block_size,               \
      const Index* query_start_loc, const Index* seq_lens, Index requests, Index heads, Index kv_heads,            \
      Index head_dim, float scale) {                                                                                \
    paged_attention(q, q_stride, k, k_stride, v, v_stride, out, keys, values, slots, block_tables, table_width,     \
                    block_size, query_start_loc, seq_lens, requests, heads, kv_heads, head_dim, scale); }

EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)
