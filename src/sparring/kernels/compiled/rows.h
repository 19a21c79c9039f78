// Operations within one row, shared by the kernels that run over many rows and by the step of the decoder.
// T is float or bf16; arithmetic is float32 and rounds once where the result is stored.
#pragma once

#include "tile.h"

namespace sparring {

template <class T> static inline v16 round_to(v16 a);
template <> inline v16 round_to<float>(v16 a) { return a; }
template <> inline v16 round_to<bf16>(v16 a) {
    bf16 rounded[LANES];
    store(rounded, a);
    return load(rounded);
}

template <class T> static inline float inverse_rms(const T *x, int64_t D, float eps) {
    v16 sum = splat(0.0f);
    for (int64_t i = 0; i < D; i += LANES) {
        v16 a = load_tail(x + i, D - i);
        sum = fma(a, a, sum);
    }
    return 1.0f / std::sqrt(lane_sum(sum) / (float)D + eps);
}

// y may be x.
template <class T> static inline void rms_norm_row(const T *x, const T *weight, T *y, int64_t D, float eps) {
    v16 inverse = splat(inverse_rms(x, D, eps));
    for (int64_t i = 0; i < D; i += LANES) {
        v16 normed = round_to<T>(load_tail(x + i, D - i) * inverse);
        store_tail(y + i, D - i, load_tail(weight + i, D - i) * normed);
    }
}

// silu(gate) * up for up to 16 elements; `up` may be null (plain SiLU).
template <class T> static inline void silu_mul_strip(const T *gate, const T *up, T *y, int64_t count) {
    v16 a = load_tail(gate, count), out = a * sigmoid(a);
    store_tail(y, count, up ? out * load_tail(up, count) : out);
}

// gate_up [2 I] -> silu(gate) * up [I].
template <class T> static inline void swiglu_row(const T *gate_up, T *y, int64_t I) {
    for (int64_t i = 0; i < I; i += LANES) silu_mul_strip(gate_up + i, gate_up + I + i, y + i, I - i);
}

// [a, b] -> [a cos_a - b sin_a, b cos_b + a sin_b] for the halves a, b of a head; `transposed` gives the gradient. out
// may be in.
template <class T>
static inline void rotate(const T *in, const T *c, const T *s, T *out, int64_t half, bool transposed) {
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t count = half - i;
        v16 a = load_tail(in + i, count), b = load_tail(in + half + i, count);
        v16 sin_a = load_tail(s + i, count), sin_b = load_tail(s + half + i, count);
        v16 cross_a = transposed ? b * sin_b : -(b * sin_a), cross_b = transposed ? -(a * sin_a) : a * sin_b;
        store_tail(out + i, count, fma(a, load_tail(c + i, count), cross_a));
        store_tail(out + half + i, count, fma(b, load_tail(c + half + i, count), cross_b));
    }
}

// x += y, rounded once.
template <class T> static inline void add_row(T *x, const T *y, int64_t D) {
    for (int64_t i = 0; i < D; i += LANES) store_tail(x + i, D - i, load_tail(x + i, D - i) + load_tail(y + i, D - i));
}

}  // namespace sparring
