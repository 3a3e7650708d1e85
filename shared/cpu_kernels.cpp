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

// ---- Attention over the cache in place ----

constexpr Index LANES = 16;   // numbers that one vector holds
constexpr Index KEYS = 64;    // keys of one tile
constexpr Index TOKENS = 16;  // queries of one tile, each with all heads that share a key-value head
constexpr Index ROWS = 3;     // queries whose sums stay in registers while the values go by

typedef float Vector __attribute__((vector_size(LANES * 4)));
typedef std::uint32_t WideBits __attribute__((vector_size(LANES * 4)));
typedef std::uint16_t Bits __attribute__((vector_size(LANES * 2)));
typedef float Half __attribute__((vector_size(LANES * 2)));
typedef float Quarter __attribute__((vector_size(LANES)));

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
// The sixteen numbers added up to four; adding those as well is left to a loop over many sums.
inline Quarter fold(const Vector& x) {
  Half halves[2];
  std::memcpy(halves, &x, sizeof halves);
  Half both = halves[0] + halves[1];
  Quarter quarters[2];
  std::memcpy(quarters, &both, sizeof quarters);
  return quarters[0] + quarters[1];
}

// One layer of the cache and the step's block tables: where the keys and values of each request lie.
template <class T> struct Cache {
  const T *keys, *values;  // [slots, kv_heads, head_dim]
  const Index* block_tables;  // [requests, table_width]
  Index table_width, block_size, kv_heads, head_dim;
};

// A few neighbouring queries of one request, and one key-value head.
struct Tile { Index request, first_token, num_tokens, first_position, kv_head; };

// Softmax computed as the keys come by (Milakov and Gimelshein, 2018): each row, one query of one head, holds
// its maximum and its sums so far. PARTS vectors make a head.
//
// For few rows: a vector holds sixteen dimensions of one key.
template <class T, Index PARTS> class RunningAttention {
 public:
  static constexpr Index DIM = PARTS * LANES;

  RunningAttention(Index rows, const Index* limits)
      : rows(rows), limits(limits), queries(rows * DIM), sums(rows * DIM), scores(rows * KEYS), partial(rows * KEYS * 4),
        maxima(rows, -std::numeric_limits<float>::infinity()), totals(rows) {}

  void set_query(Index row, const T* q, float scale) {
    for (Index i = 0; i < DIM; ++i) queries[row * DIM + i] = widen(q[i]) * scale;
  }

  // Keys `first` to `first + count` of the request; a row may see those below its limit.
  void add(const T* const* keys, const T* const* values, Index first, Index count) {
    for (Index j = 0; j < count; ++j) score(keys[j], j);
    for (Index row = 0; row < rows; ++row) weigh(row, count, std::min(count, limits[row] - first));
    Index row = 0;
    for (; row + ROWS <= rows; row += ROWS) add_values<ROWS>(row, values, count);
    for (; row < rows; ++row) add_values<1>(row, values, count);
  }

  void result(Index row, T* out) const {
    for (Index i = 0; i < DIM; ++i) out[i] = narrow<T>(sums[row * DIM + i] / totals[row]);
  }

 private:
  void score(const T* key, Index j) {
    Vector own[PARTS];
    for (Index p = 0; p < PARTS; ++p) own[p] = load(key + p * LANES);
    for (Index row = 0; row < rows; ++row) {
      Vector product = load(&queries[row * DIM]) * own[0];
      for (Index p = 1; p < PARTS; ++p) product += load(&queries[row * DIM + p * LANES]) * own[p];
      Quarter folded = fold(product);
      std::memcpy(&partial[(row * KEYS + j) * 4], &folded, sizeof folded);
    }
  }

  // From scores to weights relative to the maximum so far; what was summed under a smaller one shrinks.
  void weigh(Index row, Index count, Index visible) {
    float *own = &scores[row * KEYS], best = maxima[row], total = 0;
    const float* folded = &partial[row * KEYS * 4];
    for (Index j = 0; j < count; ++j)
      own[j] = (folded[4 * j] + folded[4 * j + 1]) + (folded[4 * j + 2] + folded[4 * j + 3]);
    for (Index j = std::max(Index(0), visible); j < count; ++j) own[j] = -std::numeric_limits<float>::infinity();
#pragma omp simd reduction(max : best)
    for (Index j = 0; j < count; ++j) best = std::max(best, own[j]);
#pragma omp simd reduction(+ : total)
    for (Index j = 0; j < count; ++j) total += own[j] = exponential(own[j] - best);
    float shrink = exponential(maxima[row] - best);
    for (Index i = 0; i < DIM; ++i) sums[row * DIM + i] *= shrink;
    totals[row] = totals[row] * shrink + total;
    maxima[row] = best;
  }

  template <Index N> void add_values(Index row, const T* const* values, Index count) {
    Vector own[N][PARTS];
    for (Index r = 0; r < N; ++r)
      for (Index p = 0; p < PARTS; ++p) own[r][p] = load(&sums[(row + r) * DIM + p * LANES]);
    for (Index j = 0; j < count; ++j)
      for (Index p = 0; p < PARTS; ++p) {
        Vector value = load(values[j] + p * LANES);
        for (Index r = 0; r < N; ++r) own[r][p] += value * scores[(row + r) * KEYS + j];
      }
    for (Index r = 0; r < N; ++r) std::memcpy(&sums[(row + r) * DIM], own[r], sizeof own[r]);
  }

  Index rows;
  const Index* limits;  // a row may see the keys below its own
  std::vector<float> queries, sums, scores, partial, maxima, totals;
};

// For many rows: a vector holds sixteen rows, so that neither scores nor maxima need adding up across a vector.
// Keys and values are widened once for all rows.
template <class T, Index PARTS> class TiledAttention {
 public:
  static constexpr Index DIM = PARTS * LANES;
  static constexpr Index TOGETHER = PARTS <= 4 ? 4 : PARTS <= 8 ? 2 : 1;  // rows whose sums fit in registers

  TiledAttention(Index rows, const Index* own_limits)
      : width((rows + LANES - 1) / LANES * LANES), limits(width, std::numeric_limits<std::int32_t>::max()),
        queries(DIM * width), sums(width * DIM), scores(KEYS * width), tile(KEYS * DIM),
        maxima(width, -std::numeric_limits<float>::infinity()), totals(width), shrink(width) {
    std::copy(own_limits, own_limits + rows, limits.begin());
  }

  void set_query(Index row, const T* q, float scale) {
    for (Index i = 0; i < DIM; ++i) queries[i * width + row] = widen(q[i]) * scale;
  }

  void add(const T* const* keys, const T* const* values, Index first, Index count) {
    spread(keys, count);
    Index row = 0;
    for (; row + 3 * LANES <= width; row += 3 * LANES) score<3>(row, count);
    for (; row < width; row += LANES) score<1>(row, count);
    hide(first, count);
    for (row = 0; row < width; row += LANES) weigh(row, count);
    spread(values, count);
    for (row = 0; row < width; row += TOGETHER) add_values(row, count);
  }

  void result(Index row, T* out) const {
    for (Index i = 0; i < DIM; ++i) out[i] = narrow<T>(sums[row * DIM + i] / totals[row]);
  }

 private:
  void spread(const T* const* from, Index count) {
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < DIM; ++i) tile[j * DIM + i] = widen(from[j][i]);
    std::fill(&tile[count * DIM], tile.data() + (count + 3) / 4 * 4 * DIM, 0.0f);  // score goes by fours
  }

  template <Index N> void score(Index row, Index count) {
    for (Index j = 0; j < count; j += 4) {
      Vector own[4][N] = {};
      for (Index i = 0; i < DIM; ++i)
        for (Index n = 0; n < N; ++n) {
          Vector query = load(&queries[i * width + row + n * LANES]);
          for (Index c = 0; c < 4; ++c) own[c][n] += query * tile[(j + c) * DIM + i];
        }
      for (Index c = 0; c < 4; ++c) std::memcpy(&scores[(j + c) * width + row], own[c], sizeof own[c]);
    }
  }

  void hide(Index first, Index count) {
    for (Index j = std::max(Index(0), limits[0] - first); j < count; ++j)
#pragma omp simd
      for (Index row = 0; row < width; ++row)
        scores[j * width + row] = std::int32_t(first + j) < limits[row] ? scores[j * width + row]
                                                                        : -std::numeric_limits<float>::infinity();
  }

  void weigh(Index first_row, Index count) {
    float best[LANES], total[LANES] = {};
    std::copy(&maxima[first_row], &maxima[first_row] + LANES, best);
    for (Index j = 0; j < count; ++j)
#pragma omp simd
      for (Index r = 0; r < LANES; ++r) best[r] = std::max(best[r], scores[j * width + first_row + r]);
    for (Index j = 0; j < count; ++j)
#pragma omp simd
      for (Index r = 0; r < LANES; ++r)
        total[r] += scores[j * width + first_row + r] = exponential(scores[j * width + first_row + r] - best[r]);
#pragma omp simd
    for (Index r = 0; r < LANES; ++r) {
      shrink[first_row + r] = exponential(maxima[first_row + r] - best[r]);
      totals[first_row + r] = totals[first_row + r] * shrink[first_row + r] + total[r];
      maxima[first_row + r] = best[r];
    }
  }

  void add_values(Index row, Index count) {
    Vector own[TOGETHER][PARTS];
    for (Index r = 0; r < TOGETHER; ++r)
      for (Index p = 0; p < PARTS; ++p) own[r][p] = load(&sums[(row + r) * DIM + p * LANES]) * shrink[row + r];
    for (Index j = 0; j < count; ++j)
      for (Index p = 0; p < PARTS; ++p) {
        Vector value = load(&tile[j * DIM + p * LANES]);
        for (Index r = 0; r < TOGETHER; ++r) own[r][p] += value * scores[j * width + row + r];
      }
    for (Index r = 0; r < TOGETHER; ++r) std::memcpy(&sums[(row + r) * DIM], own[r], sizeof own[r]);
  }

  Index width;  // rows, filled up to whole vectors
  std::vector<std::int32_t> limits;
  std::vector<float> queries, sums, scores, tile, maxima, totals, shrink;  // queries [DIM, width], scores [KEYS, width]
};

// q and out [tokens, heads, head_dim]; q may be a part of longer rows, q_stride elements apart.
template <class Attention, class T>
void attend_by(const Tile& own, const Cache<T>& cache, const T* q, Index q_stride, T* out, Index heads, float scale) {
  Index group = heads / cache.kv_heads, rows = own.num_tokens * group, dim = cache.head_dim;
  std::vector<Index> limits(rows);
  for (Index row = 0; row < rows; ++row) limits[row] = own.first_position + row / group + 1;
  Attention attention(rows, limits.data());
  for (Index row = 0; row < rows; ++row) {
    Index token = own.first_token + row / group, head = own.kv_head * group + row % group;
    attention.set_query(row, q + token * q_stride + head * dim, scale);
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
    attention.add(keys, values, first, count);
  }
  for (Index row = 0; row < rows; ++row) {
    Index token = own.first_token + row / group, head = own.kv_head * group + row % group;
    attention.result(row, out + (token * heads + head) * dim);
  }
}

template <class T, Index PARTS>
void attend(const Tile& own, const Cache<T>& cache, const T* q, Index q_stride, T* out, Index heads, float scale) {
  bool many = own.num_tokens * heads / cache.kv_heads >= LANES;
  (many ? attend_by<TiledAttention<T, PARTS>, T> : attend_by<RunningAttention<T, PARTS>, T>)(
      own, cache, q, q_stride, out, heads, scale);
}

// The kernel for a head size; nullptr for one that was not compiled.
template <class T> auto attend_for(Index head_dim) -> decltype(&attend<T, 1>) {
  switch (head_dim) {
    case 16: return attend<T, 1>;
    case 32: return attend<T, 2>;
    case 64: return attend<T, 4>;
    case 80: return attend<T, 5>;
    case 96: return attend<T, 6>;
    case 128: return attend<T, 8>;
    case 256: return attend<T, 16>;
    default: return nullptr;
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
  auto attend_tile = attend_for<T>(head_dim);
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
    for (Index i = 0; i < Index(tiles.size()); ++i) attend_tile(tiles[i], cache, q, q_stride, out, heads, scale);
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
