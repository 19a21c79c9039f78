// Gradient of causal packed attention, recomputed from the saved logsumexp (Dao et al. 2022, algorithm 4, without
// tiling over keys: a sequence's keys fit the cache). One task is one key/value head of one part; parts depend on the
// sequences alone and everything inside one runs in a fixed order, so gradients do not depend on the thread count.
#include <memory>

#include "attention.h"
#include "parallel.h"

namespace sparring {
namespace {

constexpr int64_t QUERIES = 64;  // query rows of one head whose weights are held at once: [48][length]
constexpr int64_t ROWS_PER_PART = 256;

template <class T> struct Head {
    int64_t count, kept, pitch, d;  // query rows sit behind `kept` earlier positions of their sequence
    const float *q, *k, *v, *grad;  // [count][d] of one query head, [kept + count][d] keys and values; widened
    const float *kt, *vt;           // keys and values in blocks of 16 positions, each [d][16]
    const float *logsumexp, *delta;  // [count]
    T *dq;                           // rows `stride` apart
    int64_t stride;
    float *dk, *dv;           // as k, v
    float *weights, *slopes;  // [QUERIES][pitch]: exp(score - logsumexp) and the gradient of q . k
    Form form;

    // The first position that query row `row` reads.
    int64_t begin(int64_t row) const { return form.begin(kept + row + 1); }
};

// write(r, column, sum over i in [begin, end) of a(r, i) * rows[i][column]) for `count` rows r and every vector of
// columns.
template <class A, class Write>
static inline void sum_rows(int64_t count, const float *rows, int64_t d, int64_t begin, int64_t end, A a, Write write) {
    with_rows(count, [&]<int R>() {
        with_columns(d / LANES, [&]<int C>(int64_t column) {
            v16 acc[R][C];
            clear(acc);
            const float *from = rows + column * LANES;
            accumulate(acc, begin, end, a, [=](int64_t i, int c) { return load(from + i * d + c * LANES); });
#pragma GCC unroll 6
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) write(r, (column + c) * LANES, acc[r][c]);
        });
    });
}

// Weights and score gradients of R query rows from `row` on over C blocks of positions; zero where a row may not read.
template <int R, int C, class T>
static inline void recompute_blocks(const Head<T> &h, int64_t row, int64_t block, float *weights, float *slopes) {
    v16 scores[R][C], products[R][C];
    clear(scores);
    clear(products);
    const float *q = h.q + row * h.d, *grad = h.grad + row * h.d, *k = h.kt + block * LANES * h.d,
                *v = h.vt + block * LANES * h.d;
    int64_t d = h.d;
    accumulate(scores, 0, d, [=](int r, int64_t i) { return q[r * d + i]; },
               [=](int64_t i, int c) { return load(k + (c * d + i) * LANES); });
    accumulate(products, 0, d, [=](int r, int64_t i) { return grad[r * d + i]; },
               [=](int64_t i, int c) { return load(v + (c * d + i) * LANES); });
    alignas(64) static const float lane[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const v16 scale = splat(h.form.scale), cap = splat(h.form.cap), one = splat(1.0f), zero = splat(0.0f);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            int64_t at = (block + c) * LANES, inside = h.kept + row + r + 1 - at, before = h.begin(row + r) - at;
            v16 score = scores[r][c] * scale, slope = scale;
            if (h.form.cap > 0) {
                v16 bent = tanh(score / cap);
                score = bent * cap;
                slope = scale * (one - bent * bent);
            }
            v16 weight = exp(score - splat(h.logsumexp[row + r]));
            slope = weight * (products[r][c] - splat(h.delta[row + r])) * slope;
            if (before > 0) {
                const v16 begin = splat((float)before);
                weight = less_select(load(lane), begin, zero, weight);
                slope = less_select(load(lane), begin, zero, slope);
            }
            if (inside < LANES) {
                const v16 end = splat((float)inside);
                weight = less_select(load(lane), end, weight, zero);
                slope = less_select(load(lane), end, slope, zero);
            }
            store(weights + r * h.pitch + at, weight);
            store(slopes + r * h.pitch + at, slope);
        }
}

// One tile of query rows: weights and slopes from the block of the first position that it reads to that of its last,
// zeros in the blocks before and after, which a tile of keys may reach into.
template <class T> static void recompute(const Head<T> &h, int64_t row, int64_t count, float *weights, float *slopes) {
    int64_t blocks = blocks_of(h.kept + row + count, LANES), block = h.begin(row) / LANES, before = block - 1;
    with_rows(count, [&]<int R>() {
        for (; block + 2 <= blocks; block += 2) recompute_blocks<R, 2>(h, row, block, weights, slopes);
        if (block < blocks) recompute_blocks<R, 1>(h, row, block, weights, slopes);
    });
    for (int64_t edge : {before, blocks}) {
        if (edge < 0 || edge * LANES == h.pitch) continue;
        for (int64_t r = 0; r < count; r++)
            for (float *plane : {weights, slopes}) store(plane + r * h.pitch + edge * LANES, splat(0.0f));
    }
}

// No row is asked about keys past its own position, or out of its window: a tile of queries ends, and a tile of keys
// begins, at the diagonal; the window bounds their other ends.
template <class T> static void one_head(const Head<T> &h) {
    int64_t pitch = h.pitch, d = h.d;
    for (int64_t first = 0; first < h.count; first += QUERIES) {
        int64_t count = smaller(QUERIES, h.count - first), reach = h.kept + first + count;
        for (int64_t row = 0; row < count; row += TILE_ROWS) {
            int64_t rows = smaller(TILE_ROWS, count - row);
            float *ds = h.slopes + row * pitch;
            recompute(h, first + row, rows, h.weights + row * pitch, ds);
            sum_rows(
                rows, h.k, d, h.begin(first + row), h.kept + first + row + rows,
                [=](int r, int64_t i) { return ds[r * pitch + i]; },
                [&](int r, int64_t j, v16 sum) { store(h.dq + (first + row + r) * h.stride + j, sum); });
        }
        for (int64_t key = h.begin(first); key < reach; key += TILE_ROWS) {
            const float *p = h.weights + key, *ds = h.slopes + key;
            int64_t keys = smaller(TILE_ROWS, reach - key), begin = larger(0, key - h.kept - first);
            int64_t end = h.form.window > 0 ? smaller(count, key + keys - 1 + h.form.window - h.kept - first) : count;
            auto add_to = [=](float *out) {
                return [=](int r, int64_t j, v16 sum) { store(out + r * d + j, load(out + r * d + j) + sum); };
            };
            sum_rows(keys, h.grad + first * d, d, begin, end, [=](int r, int64_t i) { return p[i * pitch + r]; },
                     add_to(h.dv + key * d));
            sum_rows(keys, h.q + first * d, d, begin, end, [=](int r, int64_t i) { return ds[i * pitch + r]; },
                     add_to(h.dk + key * d));
        }
    }
}

template <class T> struct Call {
    const T *q, *k, *v, *out, *grad;
    const float *logsumexp;
    T *dq;
    float *dk, *dv;  // float32 for every T: gradients of shared rows are accumulated here
    int64_t H, G, d;
    Form form;
};

// Of query rows [start, start + count) and one head: q and the gradient widened to [count][d], grad . out and the
// logsumexp.
template <class T>
static void gather_rows(const Call<T> &c, int64_t start, int64_t count, int64_t head, float *q, float *grad,
                        float *delta, float *lse) {
    for (int64_t i = 0; i < count; i++) {
        int64_t at = ((start + i) * c.H + head) * c.d;
        v16 sum = splat(0.0f);
        for (int64_t j = 0; j < c.d; j += LANES) {
            v16 g = load(c.grad + at + j);
            store(q + i * c.d + j, load(c.q + at + j));
            store(grad + i * c.d + j, g);
            sum = fma(g, load(c.out + at + j), sum);
        }
        delta[i] = lane_sum(sum);
        lse[i] = c.logsumexp[(start + i) * c.H + head];
    }
}

// Rows [begin, end) of [end][d] into blocks [d][16], whole blocks at a time; positions past `end` become zeros.
static void transpose_rows(float *rows, int64_t begin, int64_t end, int64_t d, float *blocks) {
    memset(rows + end * d, 0, (blocks_of(end, LANES) * LANES - end) * d * sizeof(float));
    for (int64_t block = begin / LANES * LANES; block < end; block += LANES)
        for (int64_t j = 0; j < d; j += LANES) {
            v16 tile[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) tile[i] = load(rows + (block + i) * d + j);
            transpose(tile);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) store(blocks + block * d + (j + i) * LANES, tile[i]);
        }
}

// One key/value head of one part. Keys, values and their gradients stand by position; the gradient of a position is
// added up over all sequences that share it and leaves when the walk leaves the position.
template <class T> struct Part {
    const Call<T> &c;
    const Sequences &sequences;
    int64_t begin, end, g, pitch;
    int32_t *path;
    float *k, *v, *kt, *vt, *q, *grad, *dk, *dv, *weights, *slopes, *delta, *lse;
    float *outside;  // [kept(begin)][2][d]: gradients of positions whose rows belong to earlier parts

    Part(const Call<T> &c, const Sequences &sequences, int64_t begin, int64_t end, int64_t g, float *outside)
        : c(c), sequences(sequences), begin(begin), end(end), g(g), outside(outside) {
        int64_t longest = 0;
        for (int64_t b = begin; b < end; b++) longest = larger(longest, sequences.length(b));
        pitch = blocks_of(longest, LANES) * LANES;
        int64_t size = pitch * c.d;
        Scratch &mine = Scratch::mine();
        float *room = mine.values.room(8 * size + 2 * QUERIES * pitch + 2 * pitch);
        for (float **plane : {&k, &v, &kt, &vt, &q, &grad, &dk, &dv}) *plane = room, room += size;
        for (float **plane : {&weights, &slopes}) *plane = room, room += QUERIES * pitch;
        delta = room;
        lse = room + pitch;
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
        transpose_rows(k, from, length, c.d, kt);
        transpose_rows(v, from, length, c.d, vt);
        memset(dk + from * c.d, 0, (length - from) * c.d * sizeof(float));
        memset(dv + from * c.d, 0, (length - from) * c.d * sizeof(float));
    }

    void query_head(int64_t b, int64_t head) {
        int64_t start = sequences.cu_seqlens[b], count = sequences.own(b), stride = c.H * c.d,
                from = start * stride + head * c.d;
        gather_rows(c, start, count, head, q, grad, delta, lse);
        one_head(Head<T>{count, sequences.kept(b), pitch, c.d, q, k, v, grad, kt, vt, lse, delta, c.dq + from, stride,
                         dk, dv, weights, slopes, c.form});
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

// Adds the gradients that parts computed for rows of earlier parts, part by part.
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
    auto found = [&](int64_t p, int64_t g) {
        return outside.get() + offset[p] + g * sequences.kept(parts[p]) * 2 * c.d;
    };
    parallel_for(num_parts * c.G, threads, [&](int64_t task) {
        int64_t p = task / c.G, g = task % c.G;
        Part<T>(c, sequences, parts[p], parts[p + 1], g, found(p, g)).run();
    });
    parallel_for(c.G, threads, [&](int64_t g) {
        for (int64_t p = 0; p < num_parts; p++) add_outside(c, sequences, parts[p], g, found(p, g));
    });
}

}  // namespace

// The gradient of the sinks is the caller's: it needs no keys.
#define SPARRING_ATTENTION_BACKWARD(NAME, T)                                                                           \
    void sparring_attention_backward_##NAME(                                                                           \
        const T *q, const T *k, const T *v, const T *out, const T *grad, const float *logsumexp, T *dq, float *dk,     \
        float *dv, const int32_t *cu_seqlens, const int32_t *shared, int64_t B, int64_t H, int64_t G, int64_t d,       \
        float scale, float cap, int64_t window, int threads) {                                                         \
        backward(Call<T>{q, k, v, out, grad, logsumexp, dq, dk, dv, H, G, d, {scale, cap, window, nullptr}},           \
                 Sequences{cu_seqlens, shared, B}, threads);                                                           \
    }

extern "C" {
SPARRING_ATTENTION_BACKWARD(f32, float)
SPARRING_ATTENTION_BACKWARD(bf16, bf16)
}
}  // namespace sparring
