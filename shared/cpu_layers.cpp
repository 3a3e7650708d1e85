// All decoder layers of a step in one call, in bfloat16: what Python would otherwise ask for one operation at a time.
#include "cpu_linear.h"

#ifdef __AVX512BF16__

using T = bfloat16;

// Field by field as in cpu_ops.py.
struct Weights {
  const T *input_norm, *post_norm, *q_norm, *k_norm, *qkv, *qkv_bias, *o, *o_bias;
  const T *gate_up, *gate_up_bias, *down, *down_bias;
};
struct Shape { Index hidden, intermediate, heads, kv_heads, head_dim; float eps, qk_eps; };
struct Step {
  T *keys, *values;  // of the first layer
  const float *cos, *sin;
  const Index *slots, *block_tables, *query_start_loc, *seq_lens;
  Index layer_size, table_width, block_size, requests, tokens;
};

extern "C" {
void add_rms_norm_bfloat16(T* x, const T* delta, const T* weight, T* out, Index rows, Index size, float eps);
void rotary_bfloat16(T* qkv, const T* q_weight, const T* k_weight, const float* cos, const float* sin, Index tokens,
                     Index heads, Index kv_heads, Index head_dim, float eps);
void paged_attention_bfloat16(const T* q, Index q_stride, const T* k, Index k_stride, const T* v, Index v_stride, T* out,
                              T* keys, T* values, const Index* slots, const Index* block_tables, Index table_width,
                              Index block_size, const Index* query_start_loc, const Index* seq_lens, Index requests,
                              Index heads, Index kv_heads, Index head_dim, float scale);
}

// x [tokens, hidden] is the residual stream; scratch holds what passes between the operations.
void decoder_layer(const Weights& w, Index layer, const Shape& shape, const Step& step, T* x, T* scratch) {
  Index tokens = step.tokens, q_size = shape.heads * shape.head_dim, kv_size = shape.kv_heads * shape.head_dim;
  Index qkv_size = q_size + 2 * kv_size, offset = layer * step.layer_size;
  T *normed = scratch, *qkv = normed + tokens * shape.hidden, *mixed = qkv + tokens * qkv_size;
  T* active = mixed + tokens * q_size;

  add_rms_norm_bfloat16(x, nullptr, w.input_norm, normed, tokens, shape.hidden, shape.eps);
  linear({normed, w.qkv, w.qkv_bias, qkv, tokens, shape.hidden, qkv_size}, Into::replaced);
  rotary_bfloat16(qkv, w.q_norm, w.k_norm, step.cos, step.sin, tokens, shape.heads, shape.kv_heads, shape.head_dim,
                  shape.qk_eps);
  const T *k = qkv + q_size, *v = k + kv_size;
  paged_attention_bfloat16(qkv, qkv_size, k, qkv_size, v, qkv_size, mixed, step.keys + offset, step.values + offset,
                           step.slots, step.block_tables, step.table_width, step.block_size, step.query_start_loc,
                           step.seq_lens, step.requests, shape.heads, shape.kv_heads, shape.head_dim,
                           1.0f / std::sqrt(float(shape.head_dim)));
  linear({mixed, w.o, w.o_bias, x, tokens, q_size, shape.hidden}, Into::added);
  add_rms_norm_bfloat16(x, nullptr, w.post_norm, normed, tokens, shape.hidden, shape.eps);
  linear({normed, w.gate_up, w.gate_up_bias, active, tokens, shape.hidden, 2 * shape.intermediate}, Into::gated);
  linear({active, w.down, w.down_bias, x, tokens, shape.intermediate, shape.hidden}, Into::added);
}

extern "C" void decoder_layers_bfloat16(const Weights* layers, Index count, const Shape* shape, const Step* step, T* x,
                                        T* scratch) {
  for (Index layer = 0; layer < count; ++layer) decoder_layer(layers[layer], layer, *shape, *step, x, scratch);
}
#endif
