// Attention over the cache in place: one call for the whole ragged batch, no copy of keys and values.
#include <limits>
#include <vector>

#include "cpu_vectors.h"

constexpr Index KEYS = 64;    // keys of one tile
constexpr Index TOKENS = 16;  // queries of one tile, each with all heads that share a key-value head
constexpr Index PARALLEL = 8; // requests that keep all threads busy
constexpr Index FEW = 16;     // queries of a tile below which a vector holds dimensions, not queries
constexpr Index ROWS = LANES == 16 ? 3 : 1;  // queries whose sums stay in registers

// One layer of the cache and the step's block tables: where the keys and values of each request lie.
template <class T> struct Cache {
  const T *keys, *values;  // [slots, kv_heads, head_dim]
  const Index* block_tables;  // [requests, table_width]
  Index table_width, block_size, kv_heads, head_dim;
};

// A few neighbouring queries of one request, and neighbouring key-value heads.
struct Tile { Index request, first_token, num_tokens, first_position, first_head, num_heads; };

// Where the keys and values of some neighbouring tokens lie, from the first head of a tile on.
template <class T> struct Places {
  const T *keys[KEYS], *values[KEYS];
  Index count = 0;

  void fetch(const T* const* rows, Index j, Index from, Index size) const {  // from memory, while others are at work
    constexpr Index line = 64 / sizeof(T);
    for (Index i = 0; j < count && i < size; i += line) __builtin_prefetch(rows[j] + from + i);
  }
};

// The tokens of a request, one after another.
template <class T> class Walk {
 public:
  Walk(const Cache<T>& cache, const Tile& own)
      : cache(cache), block(cache.block_tables + own.request * cache.table_width), first_head(own.first_head) {}

  void next(Index count, Places<T>& places) {
    for (Index j = 0; j < count; ++j) {
      Index at = ((*block * cache.block_size + inside) * cache.kv_heads + first_head) * cache.head_dim;
      places.keys[j] = cache.keys + at, places.values[j] = cache.values + at;
      if (++inside == cache.block_size) inside = 0, ++block;
    }
    places.count = count;
  }

 private:
  const Cache<T>& cache;
  const Index* block;
  Index first_head, inside = 0;
};

// Softmax computed as the keys come by (Milakov and Gimelshein, 2018): each row, one query of one head, holds
// its maximum and its sums so far.
//
// For few rows: a vector holds neighbouring dimensions of one key.
template <class T, Index DIM> class RunningAttention {
 public:
  RunningAttention(Index rows, const Index* limits)
      : rows(rows), limits(limits), queries(rows * PARTS * L::SIZE), weights(rows * KEYS), scores(rows * KEYS),
        sums(rows * PARTS * L::SIZE), maxima(rows, -std::numeric_limits<float>::infinity()), totals(rows) {}

  void set_query(Index row, const T* q, float factor) {
    std::copy(q, q + DIM, &queries[row * PARTS * L::SIZE]);
    scale = factor;
  }

  // Keys of the request, `first` and those after it, of the head `from`; a row may see those below its limit.
  void add(Places<T>& now, const Places<T>& next, Index from, Index first) {
    Index whole = (now.count + LANES - 1) / LANES * LANES;
    for (Index j = now.count; j < whole; ++j) now.keys[j] = now.keys[0], now.values[j] = now.values[0];
    for (Index row = 0; row < rows; row += ROWS) {
      Index end = std::min(row + ROWS, rows);
      bool all = end == row + ROWS;
      for (Index r = row; r < end; r += all ? ROWS : 1)
        all ? score<ROWS>(r, now, next, from, whole) : score<1>(r, now, next, from, whole);
      for (Index r = row; r < end; ++r) weigh(r, whole, std::min(now.count, limits[r] - first));
      for (Index r = row; r < end; r += all ? ROWS : 1)
        all ? mix<ROWS>(r, now, next, from) : mix<1>(r, now, next, from);
    }
  }

  void result(Index row, T* out) const {
    for (Index i = 0; i < PARTS * L::SIZE; ++i)
      if (L::place(i) < DIM) out[L::place(i)] = narrow<T>(sums[row * PARTS * L::SIZE + i] / totals[row]);
  }

 private:
  using L = Lanes<T>;
  static constexpr Index PARTS = (DIM + L::SIZE - 1) / L::SIZE;  // vectors that hold a key
  static constexpr Index SUMS = L::SIZE / LANES;                 // vectors of sums for each of them

  template <Index N> void score(Index row, const Places<T>& now, const Places<T>& next, Index from, Index whole) {
    typename L::Type query[N][PARTS];
    for (Index n = 0; n < N; ++n)
      for (Index p = 0; p < PARTS; ++p) query[n][p] = L::load(&queries[((row + n) * PARTS + p) * L::SIZE], L::SIZE);
    for (Index j = 0; j < whole; j += LANES) {
      Vector products[N][LANES];
      for (Index lane = 0; lane < LANES; ++lane) {
        next.fetch(next.keys, j + lane, from, DIM);
        Vector own[N] = {};
        UNROLLED for (Index p = 0; p < PARTS; ++p) {
          typename L::Type key = L::load(now.keys[j + lane] + from + p * L::SIZE, DIM - p * L::SIZE);
          UNROLLED for (Index n = 0; n < N; ++n) L::add_products(own[n], key, query[n][p]);
        }
        UNROLLED for (Index n = 0; n < N; ++n) products[n][lane] = own[n];
      }
      for (Index n = 0; n < N; ++n) store(sums_of(products[n]) * scale, &scores[(row + n) * KEYS + j]);
    }
  }

  // From scores to weights relative to the maximum so far; what was summed under a smaller one shrinks.
  void weigh(Index row, Index count, Index visible) {
    float* own = &scores[row * KEYS];
    for (Index j = std::max(Index(0), visible); j < count; ++j) own[j] = -std::numeric_limits<float>::infinity();
    Vector best = Vector{} + maxima[row], total{};
    for (Index j = 0; j < count; j += LANES) best = larger(best, load(own + j));
    float peak = maximum(best), shrink = exponential(maxima[row] - peak);
    for (Index j = 0; j < count; j += LANES) {
      Vector weight = exponential(load(own + j) - peak);
      total += weight;
      store(weight, &weights[row * KEYS + j]);
    }
    for (Index i = 0; i < PARTS * L::SIZE; ++i) sums[row * PARTS * L::SIZE + i] *= shrink;
    totals[row] = totals[row] * shrink + sum(total);
    maxima[row] = peak;
  }

  template <Index N> void mix(Index row, const Places<T>& now, const Places<T>& next, Index from) {
    Vector own[N][PARTS * SUMS];
    UNROLLED for (Index n = 0; n < N; ++n)
      UNROLLED for (Index i = 0; i < PARTS * SUMS; ++i)
        own[n][i] = load(&sums[((row + n) * PARTS * SUMS + i) * LANES]);
    for (Index j = 0; j < now.count; j += L::STEP) {
      typename L::Type weight[N], value[SUMS];
      for (Index step = 0; step < L::STEP; ++step) next.fetch(next.values, j + step, from, DIM);
      UNROLLED for (Index n = 0; n < N; ++n) weight[n] = L::splat(&weights[(row + n) * KEYS + j]);
      UNROLLED for (Index p = 0; p < PARTS; ++p) {
        L::spread(now.values + j, from + p * L::SIZE, DIM - p * L::SIZE, value);
        UNROLLED for (Index s = 0; s < SUMS; ++s)
          UNROLLED for (Index n = 0; n < N; ++n) L::add_products(own[n][p * SUMS + s], value[s], weight[n]);
      }
    }
    UNROLLED for (Index n = 0; n < N; ++n)
      UNROLLED for (Index i = 0; i < PARTS * SUMS; ++i)
        store(own[n][i], &sums[((row + n) * PARTS * SUMS + i) * LANES]);
  }

  Index rows;
  const Index* limits;  // a row may see the keys below its own
  float scale = 1;
  std::vector<T> queries;
  std::vector<typename L::Weight> weights;
  std::vector<float> scores, sums, maxima, totals;
};

// For many rows: a vector holds neighbouring rows, so that neither scores nor maxima need adding up across a vector.
// Keys and values are widened once for all rows.
template <class T, Index DIM> class TiledAttention {
 public:
  static constexpr Index PARTS = DIM / LANES;
  // Rows whose sums stay in registers; they divide LANES.
  static constexpr Index TOGETHER = 4 * PARTS <= SUMS_AT_HAND ? 4 : 2 * PARTS <= SUMS_AT_HAND ? 2 : 1;

  TiledAttention(Index rows, const Index* own_limits)
      : width((rows + LANES - 1) / LANES * LANES), limits(width, std::numeric_limits<std::int32_t>::max()),
        queries(DIM * width), sums(width * DIM), scores(KEYS * width), tile(KEYS * DIM),
        maxima(width, -std::numeric_limits<float>::infinity()), totals(width), shrink(width) {
    std::copy(own_limits, own_limits + rows, limits.begin());
  }

  void set_query(Index row, const T* q, float scale) {
    for (Index i = 0; i < DIM; ++i) queries[i * width + row] = widen(q[i]) * scale;
  }

  void add(Places<T>& now, const Places<T>&, Index from, Index first) {
    Index count = now.count;
    spread(now.keys, from, count);
    Index row = 0;
    for (; row + 3 * LANES <= width; row += 3 * LANES) score<3>(row, count);
    for (; row < width; row += LANES) score<1>(row, count);
    hide(first, count);
    for (row = 0; row < width; row += LANES) weigh(row, count);
    spread(now.values, from, count);
    for (row = 0; row < width; row += TOGETHER) add_values(row, count);
  }

  void result(Index row, T* out) const {
    for (Index i = 0; i < DIM; ++i) out[i] = narrow<T>(sums[row * DIM + i] / totals[row]);
  }

 private:
  void spread(const T* const* rows, Index from, Index count) {
    for (Index j = 0; j < count; ++j)
      for (Index i = 0; i < DIM; ++i) tile[j * DIM + i] = widen(rows[j][from + i]);
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
  std::vector<Attention> attention(own.num_heads, Attention(rows, limits.data()));
  auto each = [&](auto work) {  // work(attention, row, token, head) for every query of the tile
    for (Index h = 0; h < own.num_heads; ++h)
      for (Index row = 0; row < rows; ++row)
        work(attention[h], row, own.first_token + row / group, (own.first_head + h) * group + row % group);
  };
  each([&](Attention& a, Index row, Index token, Index head) {
    a.set_query(row, q + token * q_stride + head * dim, scale);
  });
  Walk<T> walk(cache, own);
  Places<T> now, next;
  Index end = limits.back();
  walk.next(std::min(KEYS, end), next);
  for (Index first = 0; first < end; first += now.count) {
    now = next;
    walk.next(std::min(KEYS, end - first - now.count), next);
    for (Index h = 0; h < own.num_heads; ++h) attention[h].add(now, next, h * dim, first);
  }
  each([&](const Attention& a, Index row, Index token, Index head) { a.result(row, out + (token * heads + head) * dim); });
}

template <class T, Index DIM>
void attend(const Tile& own, const Cache<T>& cache, const T* q, Index q_stride, T* out, Index heads, float scale) {
  bool many = own.num_tokens * heads / cache.kv_heads >= FEW;
  (many ? attend_by<TiledAttention<T, DIM>, T> : attend_by<RunningAttention<T, DIM>, T>)(
      own, cache, q, q_stride, out, heads, scale);
}

// The kernel for a head size; nullptr for one that was not compiled.
template <class T> auto attend_for(Index head_dim) -> decltype(&attend<T, 16>) {
  switch (head_dim) {
    case 16: return attend<T, 16>;
    case 32: return attend<T, 32>;
    case 64: return attend<T, 64>;
    case 80: return attend<T, 80>;
    case 96: return attend<T, 96>;
    case 128: return attend<T, 128>;
    case 256: return attend<T, 256>;
    default: return nullptr;
  }
}

// Few queries take all heads together, so that what lies side by side in memory is read together.
std::vector<Tile> tiles_of(const Index* query_start_loc, const Index* seq_lens, Index requests, Index group,
                           Index kv_heads) {
  std::vector<Tile> tiles;
  for (Index r = 0; r < requests; ++r) {
    Index start = query_start_loc[r], end = query_start_loc[r + 1];
    for (Index t = start; t < end; t += TOKENS) {
      Index count = std::min(TOKENS, end - t);
      Index together = requests >= PARALLEL && count * group < FEW ? kv_heads : 1;
      for (Index h = 0; h < kv_heads; h += together)
        tiles.push_back({r, t, count, seq_lens[r] - end + t, h, together});
    }
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
  std::vector<Tile> tiles = tiles_of(query_start_loc, seq_lens, requests, heads / kv_heads, kv_heads);
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

// What Python calls, for both types.
#define EXPORT(T, suffix)                                                                                           \
  extern "C" void paged_attention_##suffix(                                                                         \
      const T* q, Index q_stride, const T* k, Index k_stride, const T* v, Index v_stride, T* out, T* keys,          \
      T* values, const Index* slots, const Index* block_tables, Index table_width, Index block_size,               \
      const Index* query_start_loc, const Index* seq_lens, Index requests, Index heads, Index kv_heads,            \
      Index head_dim, float scale) {                                                                                \
    paged_attention(q, q_stride, k, k_stride, v, v_stride, out, keys, values, slots, block_tables, table_width,     \
                    block_size, query_start_loc, seq_lens, requests, heads, kv_heads, head_dim, scale); }

EXPORT(float, float32)
EXPORT(bfloat16, bfloat16)
