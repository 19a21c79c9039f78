// Gradient of causal packed attention, recomputed from the saved logsumexp (Dao et al. 2022, algorithm 4, without tiling
// over keys: a sequence's keys fit the cache). One task is one key/value head of one part; parts depend on the sequences
// alone and everything inside one runs in a fixed order, so gradients do not depend on the thread count.
#include <memory>

#include "attention.h"
#include "parallel.h"

namespace sparring {
namespace {

constexpr int64_t QUERIES = 48;  // query rows of one head whose weights are held at once: [48][length]
constexpr int64_t ROWS_PER_PART = 256;

struct Head {
    int64_t count, kept, pitch, d;  // query rows sit behind `kept` earlier positions of their sequence
    const float *q, *k, *v, *grad;  // [count][d] of one query head, [kept + count][d] keys and values; widened
    const float *const *k_blocks, *const *v_blocks;  // transposed, [d][16] each
    const float *logsumexp, *delta;                  // [count]
    float *dq, *dk, *dv;                             // as q, k, v
    float *weights, *slopes;                         // [QUERIES][pitch]: exp(score - logsumexp) and scale * d score
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
        with_columns(d / LANES, [&]<int C>(int64_t c) { add_product<R, C>(out, rows, d, c * LANES, depth, a); });
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
        queries.longest = grads.longest = h.kept + last;
        with_rows(count, [&]<int R>() {
            score<R>(Keys<float>{h.k_blocks, nullptr, 0, h.d}, queries, h.scale, p, h.pitch);
            score<R>(Keys<float>{h.v_blocks, nullptr, 0, h.d}, grads, 1.0f, ds, h.pitch);
        });
        for (int64_t r = 0; r < count; r++) {
            v16 shift = splat(h.logsumexp[row + r]), delta = splat(h.delta[row + r]), scale = splat(h.scale);
            float *weights = p + r * h.pitch, *slopes = ds + r * h.pitch;
            int64_t length = h.kept + row + r + 1;
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
    for (int64_t first = 0; first < h.count; first += QUERIES) {
        int64_t last = smaller(first + QUERIES, h.count), count = last - first, reach = h.kept + last, pitch = h.pitch;
        recompute(h, first, last);
        for (int64_t row = 0; row < count; row += TILE_ROWS) {
            const float *ds = h.slopes + row * pitch;
            add_rows(smaller(count - row, TILE_ROWS), h.dq + (first + row) * h.d, h.k, h.d, reach,
                     [=](int r, int64_t i) { return ds[r * pitch + i]; });
        }
        for (int64_t key = 0; key < reach; key += TILE_ROWS) {
            const float *p = h.weights + key, *ds = h.slopes + key;
            int64_t keys = smaller(reach - key, TILE_ROWS);
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
    T *dq;
    float *dk, *dv;  // float32 whatever T is: rows that sequences share are added up here
    int64_t H, G, d;
    float scale;
};

template <class T> static void narrow(const float *rows, int64_t count, int64_t d, T *out, int64_t stride) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < d; j += LANES) store(out + i * stride + j, load(rows + i * d + j));
}

// delta[i] = grad_i . out_i and this head's column of the logsumexp.
template <class T>
static void row_terms(const Call<T> &c, int64_t start, int64_t count, int64_t head, const float *grad, float *delta, float *lse) {
    for (int64_t i = 0; i < count; i++) {
        v16 sum = splat(0.0f);
        for (int64_t j = 0; j < c.d; j += LANES)
            sum = fma(load(grad + i * c.d + j), load(c.out + ((start + i) * c.H + head) * c.d + j), sum);
        delta[i] = lane_sum(sum);
        lse[i] = c.logsumexp[(start + i) * c.H + head];
    }
}

// One key/value head of one part. Keys, values and their gradients stand by position; the gradient of a position is added up
// over all sequences that share it and leaves when the walk leaves the position.
template <class T> struct Part {
    const Call<T> &c;
    const Sequences &sequences;
    int64_t begin, end, g, pitch;
    int32_t *path;
    float *k, *v, *kt, *vt, *q, *grad, *dq, *dk, *dv, *weights, *slopes, *delta, *lse;
    std::vector<const float *> k_blocks, v_blocks;
    float *outside;  // [kept(begin)][2][d]: gradients of positions whose rows belong to earlier parts

    Part(const Call<T> &c, const Sequences &sequences, int64_t begin, int64_t end, int64_t g, float *outside)
        : c(c), sequences(sequences), begin(begin), end(end), g(g), outside(outside) {
        int64_t longest = 0;
        for (int64_t b = begin; b < end; b++) longest = larger(longest, sequences.length(b));
        pitch = blocks_of(longest, LANES) * LANES;
        int64_t size = pitch * c.d;
        Scratch &mine = Scratch::mine();
        float *room = Scratch::room(mine.values, 9 * size + 2 * QUERIES * pitch + 2 * pitch);
        for (float **plane : {&k, &v, &kt, &vt, &q, &grad, &dq, &dk, &dv}) *plane = room, room += size;
        for (float **plane : {&weights, &slopes}) *plane = room, room += QUERIES * pitch;
        delta = room;
        lse = room + pitch;
        for (int64_t i = 0; i < pitch; i += LANES) {
            k_blocks.push_back(kt + i * c.d);
            v_blocks.push_back(vt + i * c.d);
        }
        mine.path.resize(longest);
        path = mine.path.data();
        sequences.path(begin, sequences.kept(begin), path);
    }

    void run() {
        for (int64_t b = begin; b < end; b++) {
            enter(b, b == begin ? 0 : sequences.kept(b));
            for (int64_t head = g * (c.H / c.G); head < (g + 1) * (c.H / c.G); head++) query_head(b, head);
            leave(b + 1 < end ? sequences.kept(b + 1) : 0, sequences.length(b));
        }
    }

    void enter(int64_t b, int64_t from) {
        int64_t kept = sequences.kept(b), length = sequences.length(b), stride = c.G * c.d;
        for (int64_t i = kept; i < length; i++) path[i] = (int32_t)(sequences.cu_seqlens[b] + i - kept);
        widen(c.k + g * c.d, stride, path, from, length, c.d, k);
        widen(c.v + g * c.d, stride, path, from, length, c.d, v);
        transpose_blocks(c.k + g * c.d, stride, path, from, length, c.d, kt);
        transpose_blocks(c.v + g * c.d, stride, path, from, length, c.d, vt);
        memset(dk + from * c.d, 0, (length - from) * c.d * sizeof(float));
        memset(dv + from * c.d, 0, (length - from) * c.d * sizeof(float));
    }

    void query_head(int64_t b, int64_t head) {
        int64_t start = sequences.cu_seqlens[b], count = sequences.own(b), stride = c.H * c.d, from = start * stride + head * c.d;
        widen(c.q + from, stride, count, c.d, q);
        widen(c.grad + from, stride, count, c.d, grad);
        row_terms(c, start, count, head, grad, delta, lse);
        memset(dq, 0, count * c.d * sizeof(float));
        one_head(Head{count, sequences.kept(b), pitch, c.d, q, k, v, grad, k_blocks.data(), v_blocks.data(), lse, delta, dq, dk,
                      dv, weights, slopes, c.scale});
        narrow(dq, count, c.d, c.dq + from, stride);
    }

    void leave(int64_t from, int64_t to) {
        for (int64_t i = from; i < to; i++) {
            bool ours = path[i] >= sequences.cu_seqlens[begin];
            int64_t at = (path[i] * c.G + g) * c.d;
            memcpy(ours ? c.dk + at : outside + 2 * i * c.d, dk + i * c.d, c.d * sizeof(float));
            memcpy(ours ? c.dv + at : outside + (2 * i + 1) * c.d, dv + i * c.d, c.d * sizeof(float));
        }
    }
};

// What the parts found for rows of earlier parts, added part by part.
template <class T>
static void add_outside(const Call<T> &c, const Sequences &sequences, int64_t begin, int64_t g, const float *outside) {
    int64_t kept = sequences.kept(begin);
    std::vector<int32_t> path(kept);
    sequences.path(begin, kept, path.data());
    for (int64_t i = 0; i < kept; i++)
        for (int64_t j = 0; j < c.d; j += LANES) {
            float *dk = c.dk + (path[i] * c.G + g) * c.d + j, *dv = c.dv + (path[i] * c.G + g) * c.d + j;
            store(dk, load(dk) + load(outside + 2 * i * c.d + j));
            store(dv, load(dv) + load(outside + (2 * i + 1) * c.d + j));
        }
}

template <class T> static void backward(const Call<T> &c, const Sequences &sequences, int threads) {
    std::vector<int64_t> parts = sequences.parts(ROWS_PER_PART), offset = {0};
    int64_t num_parts = (int64_t)parts.size() - 1;
    for (int64_t p = 0; p < num_parts; p++) offset.push_back(offset.back() + sequences.kept(parts[p]) * 2 * c.d * c.G);
    std::unique_ptr<float[]> outside(new float[offset.back()]);
    auto found = [&](int64_t p, int64_t g) { return outside.get() + offset[p] + g * sequences.kept(parts[p]) * 2 * c.d; };
    parallel_for(num_parts * c.G, threads, [&](int64_t task) {
        int64_t p = task / c.G, g = task % c.G;
        Part<T>(c, sequences, parts[p], parts[p + 1], g, found(p, g)).run();
    });
    parallel_for(c.G, threads, [&](int64_t g) {
        for (int64_t p = 0; p < num_parts; p++) add_outside(c, sequences, parts[p], g, found(p, g));
    });
}

}  // namespace

#define SPARRING_ATTENTION_BACKWARD(NAME, T)                                                                             \
    void sparring_attention_backward_##NAME(const T *q, const T *k, const T *v, const T *out, const T *grad,             \
                                            const float *logsumexp, T *dq, float *dk, float *dv,                         \
                                            const int32_t *cu_seqlens, const int32_t *shared, int64_t B, int64_t H,      \
                                            int64_t G, int64_t d, float scale, int threads) {                            \
        backward(Call<T>{q, k, v, out, grad, logsumexp, dq, dk, dv, H, G, d, scale}, Sequences{cu_seqlens, shared, B},   \
                 threads);                                                                                               \
    }

extern "C" {
SPARRING_ATTENTION_BACKWARD(f32, float)
SPARRING_ATTENTION_BACKWARD(bf16, bf16)
}
}  // namespace sparring
