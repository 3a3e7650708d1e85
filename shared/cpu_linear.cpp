// Linear layers in bfloat16, for CPUs with instructions that multiply it; sums are kept in float32.
//
// A step that decodes reads every weight for a handful of rows, so what counts is to keep up with memory. The
// weights lie in the order in which they are read, in panels of 16 outputs: [out / 16, in / 2, 16, 2]. A panel
// holds one pair of inputs after another, and of each pair the 16 outputs side by side, as the instructions want it.
#include "cpu_linear.h"
#include "cpu_vectors.h"

#ifdef __AVX512BF16__

constexpr Index OUTPUTS = 16;  // of a panel
constexpr Index ROWS = 32;     // rows for which a panel is read once
constexpr Index NEARBY = 256;  // rows that stay in the cache of a core while all panels go by
constexpr Index AHEAD = 2048;  // bytes of weights to ask for before they are needed

using Sums = float[2][ROWS][OUTPUTS];  // of two panels

// A panel and its partner: the next one, or, where gates meet ups, the one half of all panels further.
struct Pair {
  const Linear& own;
  Index panel, partner;
  const bfloat16* weights(Index p) const { return own.weights + (p ? partner : panel) * OUTPUTS * own.in; }
};

inline void fetch(const bfloat16* weights) { _mm_prefetch((const char*)weights + AHEAD, _MM_HINT_T0); }

// One instruction adds a pair of products to each of 16 sums (AVX-512 BF16).
struct Dots {
  template <Index PANELS> void multiply(const Pair& pair, Index row, Index rows, Sums& sums) {
    Index r = 0;
    for (; r + 8 <= rows; r += 8) some<PANELS, 8>(pair, row, r, sums);
    for (; r + 2 <= rows; r += 2) some<PANELS, 2>(pair, row, r, sums);
    if (r < rows) some<PANELS, 1>(pair, row, r, sums);
  }

  template <Index PANELS, Index N> void some(const Pair& pair, Index row, Index r, Sums& sums) {
    __m512 total[PANELS][N] = {};
    const bfloat16* x = pair.own.x + (row + r) * pair.own.in;
    for (Index i = 0; i < pair.own.in; i += 2) {
      __m512bh weights[PANELS];
      for (Index p = 0; p < PANELS; ++p) {
        const bfloat16* place = pair.weights(p) + i * OUTPUTS;
        weights[p] = (__m512bh)_mm512_loadu_si512(place), fetch(place);
      }
      for (Index n = 0; n < N; ++n) {
        std::int32_t inputs;
        std::memcpy(&inputs, x + n * pair.own.in + i, sizeof inputs);
        for (Index p = 0; p < PANELS; ++p)
          total[p][n] = _mm512_dpbf16_ps(total[p][n], weights[p], (__m512bh)_mm512_set1_epi32(inputs));
      }
    }
    for (Index p = 0; p < PANELS; ++p)
      for (Index n = 0; n < N; ++n) _mm512_storeu_ps(sums[p][r + n], total[p][n]);
  }
};

#ifdef __AMX_BF16__
#include <sys/syscall.h>
#include <unistd.h>

// One instruction multiplies a tile of 16 rows and 32 inputs by a tile of 32 inputs and 16 outputs (Intel AMX).
// Tiles 0 to 3 hold sums, 4 and 5 rows, 6 and 7 weights.
class Tiles {
 public:
  static bool allowed() {  // Linux wants to be asked once in a process
    static bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
  }

  ~Tiles() { _tile_release(); }

  template <Index PANELS> void multiply(const Pair& pair, Index row, Index rows, Sums& sums) {
    if (rows != shaped) shape(rows);
    rows > 16 ? some<PANELS, true>(pair, row, sums) : some<PANELS, false>(pair, row, sums);
  }

 private:
  // As many rows as there are, so that none past the last is read.
  void shape(Index rows) {
    struct {
      std::uint8_t palette = 1, start = 0, none[14] = {};
      std::uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
      std::uint8_t rows[16];
    } config;
    std::uint8_t first = std::min<Index>(rows, 16), second = std::max<Index>(rows - 16, 1);
    const std::uint8_t all[16] = {first, first, second, second, first, second, 16, 16};
    std::copy(all, all + 16, config.rows);
    asm volatile("ldtilecfg %0" ::"m"(config));
    shaped = rows;
  }

  template <Index PANELS, bool TWO> void some(const Pair& pair, Index row, Sums& sums) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    Index in = pair.own.in;
    const bfloat16 *x = pair.own.x + row * in, *first = pair.weights(0), *second = pair.weights(1);
    for (Index i = 0; i < in; i += 32) {
      _tile_loadd(6, first + i * OUTPUTS, 64);
      for (Index line = 0; line < 16; ++line) fetch(first + (i + 2 * line) * OUTPUTS);
      _tile_loadd(4, x + i, in * 2);
      _tile_dpbf16ps(0, 4, 6);
      if (TWO) { _tile_loadd(5, x + 16 * in + i, in * 2); _tile_dpbf16ps(2, 5, 6); }
      if (PANELS == 1) continue;
      _tile_loadd(7, second + i * OUTPUTS, 64);
      for (Index line = 0; line < 16; ++line) fetch(second + (i + 2 * line) * OUTPUTS);
      _tile_dpbf16ps(1, 4, 7);
      if (TWO) { _tile_dpbf16ps(3, 5, 7); }
    }
    _tile_stored(0, sums[0][0], 64);
    if (PANELS == 2) { _tile_stored(1, sums[1][0], 64); }
    if (TWO) { _tile_stored(2, sums[0][16], 64); }
    if (TWO && PANELS == 2) { _tile_stored(3, sums[1][16], 64); }
  }

  Index shaped = 0;
};
#endif

// From sums to what is stored: in place of y, added to it, or, for a panel of gates and one of ups, silu(gate) * up.
template <Into WHERE> void finish(const Pair& pair, Index panels, Index row, Index rows, const Sums& sums) {
  const Linear& own = pair.own;
  Index place[2] = {pair.panel * OUTPUTS, pair.partner * OUTPUTS}, width = WHERE == Into::gated ? own.out / 2 : own.out;
  Vector bias[2] = {};
  for (Index p = 0; own.bias && p < panels; ++p) bias[p] = load(own.bias + place[p]);
  for (Index r = 0; r < rows; ++r) {
    bfloat16* y = own.y + (row + r) * width;
    if (WHERE == Into::gated) {
      Vector gate = rounded(load(sums[0][r]) + bias[0]), up = rounded(load(sums[1][r]) + bias[1]);
      store(rounded(gate / (1.0f + exponential(-gate))) * up, y + place[0]);
      continue;
    }
    for (Index p = 0; p < panels; ++p) {
      Vector result = load(sums[p][r]) + bias[p];
      store(WHERE == Into::added ? load(y + place[p]) + rounded(result) : result, y + place[p]);
    }
  }
}

template <class Unit, Into WHERE> void multiply_all(const Linear& own) {
  Index panels = own.out / OUTPUTS, pairs = (panels + 1) / 2;
#pragma omp parallel
  {
    Unit unit;
    alignas(64) Sums sums;
    for (Index start = 0; start < own.rows; start += NEARBY)
#pragma omp for nowait
      for (Index i = 0; i < pairs; ++i) {
        Pair pair = WHERE == Into::gated ? Pair{own, i, i + pairs} : Pair{own, 2 * i, 2 * i + 1};
        Index count = pair.partner < panels ? 2 : 1;
        for (Index row = start, end = std::min(start + NEARBY, own.rows); row < end; row += ROWS) {
          Index rows = std::min(ROWS, end - row);
          count == 2 ? unit.template multiply<2>(pair, row, rows, sums)
                     : unit.template multiply<1>(pair, row, rows, sums);
          finish<WHERE>(pair, count, row, rows, sums);
        }
      }
  }
}

template <Into WHERE> void multiply(const Linear& own) {
#ifdef __AMX_BF16__
  if (Tiles::allowed()) return multiply_all<Tiles, WHERE>(own);
#endif
  multiply_all<Dots, WHERE>(own);
}

void linear(const Linear& own, Into where) {
  if (where == Into::replaced) multiply<Into::replaced>(own);
  if (where == Into::added) multiply<Into::added>(own);
  if (where == Into::gated) multiply<Into::gated>(own);
}

// What Python calls. `in` is a multiple of 32, `out` one of 16.
extern "C" void linear_bfloat16(const bfloat16* x, const bfloat16* weights, const bfloat16* bias, bfloat16* y,
                                Index rows, Index in, Index out) {
  linear({x, weights, bias, y, rows, in, out}, Into::replaced);
}
#endif
