// A linear layer in bfloat16: x [rows, in] times weights [out, in], which lie in panels.
#pragma once
#include "cpu_numbers.h"

struct Linear {
  const bfloat16 *x, *weights, *bias;  // bias [out] or nullptr
  bfloat16* y;                         // [rows, out]
  Index rows, in, out;
};

// Where the result goes. `gated`: the first half of it are gates, the second ups, and y [rows, out / 2] is silu(gate) * up.
enum class Into { replaced, added, gated };

void linear(const Linear& own, Into where);
