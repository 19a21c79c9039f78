// Gradient of causal packed attention, recomputed from the saved logsumexp (Dao et al. 2022, algorithm 4, without tiling
// over keys: a sequence's keys fit the cache). One task is one (sequence, key/value head); inside it everything runs in
// a fixed order, so gradients do not depend on the thread count.
#include "attention.h"
#include "parallel.h"

namespace sparring {
namespace {

constexpr int64_t QUERIES = 48;  // query rows of one head whose weights are held at once: [48][length]

struct Head {
    int64_t length, pitch, d;
    const float *q, *k, *v, *grad;          // [length][d], widened; q and grad belong to one query head
    const float *const *k_blocks, *const *v_blocks;  // transposed, [d][16] each
    const float *logsumexp, *delta;         // [length]
    float *dq, *dk, *dv;                    // [length][d]
    float *weights, *slopes;                // [QUERIES][pitch]: exp(score - logsumexp) and scale * d score
    float scale;
};

// out[first + r][:] += sum over i in [0, depth) of a(r, i) * rows[i][:]
template <int R, int C, class A>
static inline void add_product(float *out, const float *rows, int64_t d, int64_t column, int64_t depth, A a) {
    v16 acc[R][C];
    clear(acc);
    accumulate(acc, 0, depth, a, [=](int64_t i, int c) { return load(rows + i * d + column + c * LANES); });
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) {
            float *o = out + r * d + column + c * LANES;
            store(o, load(o) + acc[r][c]);
        }
}

template <class A> static void add_rows(int64_t count, float *out, const float *rows, int64_t d, int64_t depth, A a) {
    with_rows(count, [&]<int R>() {
        int64_t column = 0;
        for (; column + WIDE * LANES <= d; column += WIDE * LANES) add_product<R, WIDE>(out, rows, d, column, depth, a);
        for (; column < d; column += LANES) add_product<R, 1>(out, rows, d, column, depth, a);
    });
}

// Weights and score gradients of query rows [first, last); zero past each row's own position.
static void recompute(const Head &h, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row += TILE_ROWS) {
        int64_t count = smaller(last - row, TILE_ROWS);
        float *p = h.weights + (row - first) * h.pitch, *ds = h.slopes + (row - first) * h.pitch;
        Rows queries{}, grads{};
        for (int64_t r = 0; r < count; r++) {
            queries.query[r] = h.q + (row + r) * h.d;
            grads.query[r] = h.grad + (row + r) * h.d;
        }
        queries.longest = grads.longest = last;
        with_rows(count, [&]<int R>() {
            score<R>(Keys<float>{h.k_blocks, nullptr, 0, h.d}, queries, h.scale, p, h.pitch);
            score<R>(Keys<float>{h.v_blocks, nullptr, 0, h.d}, grads, 1.0f, ds, h.pitch);
        });
        for (int64_t r = 0; r < count; r++) {
            v16 shift = splat(h.logsumexp[row + r]), delta = splat(h.delta[row + r]), scale = splat(h.scale);
            float *weights = p + r * h.pitch, *slopes = ds + r * h.pitch;
            int64_t length = row + r + 1;
            for (int64_t i = 0; i < h.pitch; i += LANES) {
                int64_t inside = larger(0, smaller(length - i, LANES));
                v16 weight = splat(0.0f), slope = splat(0.0f);
                if (inside) {
                    weight = exp(load_tail(weights + i, inside, -std::numeric_limits<float>::infinity()) - shift);
                    slope = weight * (load_tail(slopes + i, inside) - delta) * scale;
                }
                store(weights + i, weight);
                store(slopes + i, slope);
            }
        }
    }
}

static void one_head(const Head &h) {
    for (int64_t first = 0; first < h.length; first += QUERIES) {
        int64_t last = smaller(first + QUERIES, h.length), count = last - first, pitch = h.pitch;
        recompute(h, first, last);
        for (int64_t row = 0; row < count; row += TILE_ROWS) {
            const float *ds = h.slopes + row * pitch;
            add_rows(smaller(count - row, TILE_ROWS), h.dq + (first + row) * h.d, h.k, h.d, last,
                     [=](int r, int64_t i) { return ds[r * pitch + i]; });
        }
        for (int64_t key = 0; key < last; key += TILE_ROWS) {
            const float *p = h.weights + key, *ds = h.slopes + key;
            int64_t keys = smaller(last - key, TILE_ROWS);
            add_rows(keys, h.dv + key * h.d, h.grad + first * h.d, h.d, count,
                     [=](int r, int64_t i) { return p[i * pitch + r]; });
            add_rows(keys, h.dk + key * h.d, h.q + first * h.d, h.d, count,
                     [=](int r, int64_t i) { return ds[i * pitch + r]; });
        }
    }
}

template <class T> struct Call {
    const T *q, *k, *v, *out, *grad;
    const float *logsumexp;
    T *dq, *dk, *dv;
    int64_t H, G, d;
    float scale;
};

template <class T> static void narrow(const float *rows, int64_t count, int64_t d, T *out, int64_t stride) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < d; j += LANES) store(out + i * stride + j, load(rows + i * d + j));
}

// delta[i] = grad_i . out_i and this head's column of the logsumexp.
template <class T>
static void row_terms(const Call<T> &c, int64_t start, int64_t length, int64_t head, const float *grad, float *delta,
                      float *lse) {
    for (int64_t i = 0; i < length; i++) {
        v16 sum = splat(0.0f);
        for (int64_t j = 0; j < c.d; j += LANES)
            sum = fma(load(grad + i * c.d + j), load(c.out + ((start + i) * c.H + head) * c.d + j), sum);
        delta[i] = lane_sum(sum);
        lse[i] = c.logsumexp[(start + i) * c.H + head];
    }
}

template <class T> static void one_sequence(const Call<T> &c, int64_t start, int64_t length, int64_t g) {
    int64_t d = c.d, pitch = blocks_of(length, LANES) * LANES, size = pitch * d, kv_stride = c.G * d, q_stride = c.H * d;
    // Scratch: k, v, their transposes, q, grad, dq, dk, dv; then the two weight planes and two row terms.
    float *base = Scratch::room(Scratch::mine().values, 9 * size + 2 * QUERIES * pitch + 2 * pitch), *room = base;
    auto take = [&](int64_t floats) { return (room += floats) - floats; };
    float *k = take(size), *v = take(size), *kt = take(size), *vt = take(size), *q = take(size), *grad = take(size);
    float *dq = take(size), *dk = take(size), *dv = take(size);
    float *weights = take(QUERIES * pitch), *slopes = take(QUERIES * pitch), *delta = take(pitch), *lse = take(pitch);
    int64_t at = start * kv_stride + g * d;
    widen(c.k + at, kv_stride, length, d, k);
    widen(c.v + at, kv_stride, length, d, v);
    transpose_blocks(c.k + at, kv_stride, length, d, kt);
    transpose_blocks(c.v + at, kv_stride, length, d, vt);
    std::vector<const float *> k_blocks, v_blocks;
    for (int64_t i = 0; i < pitch; i += LANES) {
        k_blocks.push_back(kt + i * d);
        v_blocks.push_back(vt + i * d);
    }
    memset(dk, 0, size * sizeof(float));
    memset(dv, 0, size * sizeof(float));
    for (int64_t head = g * (c.H / c.G); head < (g + 1) * (c.H / c.G); head++) {
        int64_t from = start * q_stride + head * d;
        widen(c.q + from, q_stride, length, d, q);
        widen(c.grad + from, q_stride, length, d, grad);
        row_terms(c, start, length, head, grad, delta, lse);
        memset(dq, 0, size * sizeof(float));
        one_head(Head{length, pitch, d, q, k, v, grad, k_blocks.data(), v_blocks.data(), lse, delta, dq, dk, dv, weights,
                      slopes, c.scale});
        narrow(dq, length, d, c.dq + from, q_stride);
    }
    narrow(dk, length, d, c.dk + at, kv_stride);
    narrow(dv, length, d, c.dv + at, kv_stride);
}

template <class T> static void backward(const Call<T> &c, const int32_t *cu_seqlens, int64_t B, int threads) {
    parallel_for(B * c.G, threads, [=](int64_t task) {
        int64_t b = task / c.G, start = cu_seqlens[b], length = cu_seqlens[b + 1] - start;
        if (length > 0) one_sequence(c, start, length, task % c.G);
    });
}

}  // namespace

#define SPARRING_ATTENTION_BACKWARD(NAME, T)                                                                             \
    void sparring_attention_backward_##NAME(const T *q, const T *k, const T *v, const T *out, const T *grad,             \
                                            const float *logsumexp, T *dq, T *dk, T *dv, const int32_t *cu_seqlens,      \
                                            int64_t B, int64_t H, int64_t G, int64_t d, float scale, int threads) {      \
        backward(Call<T>{q, k, v, out, grad, logsumexp, dq, dk, dv, H, G, d, scale}, cu_seqlens, B, threads);            \
    }

extern "C" {
SPARRING_ATTENTION_BACKWARD(f32, float)
SPARRING_ATTENTION_BACKWARD(bf16, bf16)
}
}  // namespace sparring
