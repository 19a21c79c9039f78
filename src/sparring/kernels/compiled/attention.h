// Common part of packed and paged attention: one tile of query rows against one key/value head.
//
// Keys lie in blocks of 16 consecutive positions, transposed: [d][16]. A score is an ascending chain over d. The
// weights of a row are exp(score - max); their sum keeps 16 lanes (lane = position mod 16) and adds them by halving.
// The weighted values are summed over positions in ascending order, in partial sums of 128 positions. All of this is a
// function of the row's query and of the keys and values that it may read, never of the tile it came in.
#pragma once

#include <vector>

#include "memory.h"
#include "tile.h"

namespace sparring {

constexpr int64_t VALUE_BLOCKS = 8;  // blocks of 16 positions in one partial sum over values

// Settings of a layer's attention scores; twin of `AttentionForm` in form.py.
struct Form {
    float scale, cap;    // a score becomes cap * tanh(score / cap); 0: no cap
    int64_t window;      // positions that read a key, from its own on; 0: all
    const float *sinks;  // [H] additional logit per head, without a value; or null

    // The first position that a row of `length` positions reads.
    int64_t begin(int64_t length) const { return window > 0 && length > window ? length - window : 0; }
    const float *sink(int64_t head) const { return sinks ? sinks + head : nullptr; }
};

// One key/value head of one sequence. Block i holds positions 16 i to 16 i + 15.
template <class T> struct Keys {
    const T *const *key_blocks;    // each [d][16]
    const T *const *value_blocks;  // each [16][d], rows `value_stride` apart
    int64_t value_stride, d;
};

// One tile: R query rows, their positions ascending, each attending to positions begin[r] to length[r] - 1.
struct Rows {
    const float *query[TILE_ROWS], *sink[TILE_ROWS];
    int64_t begin[TILE_ROWS], length[TILE_ROWS];
    float *out[TILE_ROWS];        // [d]
    float *logsumexp[TILE_ROWS];  // or null
    int64_t earliest, latest;    // of begin
    int64_t shortest, longest;
};

template <int R, int C, class T>
static inline void score_blocks(const Keys<T> &keys, const Rows &rows, int64_t block, v16 scale, float *scores,
                                int64_t pitch) {
    v16 acc[R][C];
    clear(acc);
    const T *const *k = keys.key_blocks + block;
    accumulate(acc, 0, keys.d, [&](int r, int64_t i) { return rows.query[r][i]; },
               [&](int64_t i, int c) { return load(k[c] + i * LANES); });
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(scores + r * pitch + (block + c) * LANES, acc[r][c] * scale);
}

// scores [R][pitch] <- scale * q . k for every block that a row of the tile reaches.
template <int R, class T>
static inline void score(const Keys<T> &keys, const Rows &rows, float scale, float *scores, int64_t pitch) {
    int64_t from = rows.earliest / LANES;
    with_columns(blocks_of(rows.longest, LANES) - from, [&]<int C>(int64_t block) {
        score_blocks<R, C>(keys, rows, from + block, splat(scale), scores, pitch);
    });
}

static inline v16 capped(v16 score, v16 cap) { return tanh(score / cap) * cap; }

// Turns one row of scores into exp(score - max), zero before `begin` and past `length`; returns their sum and the
// maximum.
static inline float soften(float *scores, int64_t begin, int64_t length, float cap, const float *sink, float *maximum) {
    const float lowest = -std::numeric_limits<float>::infinity();
    const int64_t from = begin / LANES * LANES;
    if (cap > 0)
        for (int64_t i = from; i < length; i += LANES) store(scores + i, capped(load(scores + i), splat(cap)));
    for (int64_t i = from; i < begin; i++) scores[i] = lowest;
    v16 best = splat(lowest);
    for (int64_t i = from; i < length; i += LANES) best = max(best, load_tail(scores + i, length - i, lowest));
    *maximum = lane_max(best);
    if (sink && *sink > *maximum) *maximum = *sink;
    v16 sum = splat(0.0f), shift = splat(*maximum);
    for (int64_t i = from; i < length; i += LANES) {
        v16 weight = exp(load_tail(scores + i, length - i, lowest) - shift);
        store(scores + i, weight);
        sum = sum + weight;
    }
    return sink ? lane_sum(sum) + lane_max(exp(splat(*sink) - shift)) : lane_sum(sum);
}

// acc [R][16 C] continues its chains over positions [begin, end) of one block.
template <int R, int C, class T>
static inline void weigh(const T *values, int64_t stride, const float *weights, int64_t pitch, int64_t begin,
                         int64_t end, v16 (&acc)[R][C]) {
    accumulate(acc, begin, end, [=](int r, int64_t i) { return weights[r * pitch + i]; },
               [=](int64_t i, int c) { return load(values + i * stride + c * LANES); });
}

// Index of the partial sum of position `begin`.
static inline int64_t partial_of(int64_t begin) { return begin / (VALUE_BLOCKS * LANES) * VALUE_BLOCKS; }

// Adds one partial sum (VALUE_BLOCKS blocks from `first`) of C column vectors to out. Positions that all rows of the
// tile read are computed together, the few before and after them row by row, so no row reads a masked position.
template <int R, int C, class T>
static inline void weigh_partial(const Keys<T> &keys, const Rows &rows, const float *weights, int64_t pitch,
                                 int64_t first, int64_t column) {
    v16 acc[R][C];
    clear(acc);
    int64_t last = smaller(first + VALUE_BLOCKS, blocks_of(rows.longest, LANES));
    auto one_by_one = [&](const T *values, int64_t base, int64_t begin, int64_t end) {
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            v16 single[1][C];
            for (int c = 0; c < C; c++) single[0][c] = acc[r][c];
            weigh(values, keys.value_stride, weights + r * pitch + base, pitch, larger(begin, rows.begin[r] - base),
                  smaller(end, rows.length[r] - base), single);
            for (int c = 0; c < C; c++) acc[r][c] = single[0][c];
        }
    };
    for (int64_t block = larger(first, rows.earliest / LANES); block < last; block++) {
        const T *values = keys.value_blocks[block] + column;
        int64_t base = block * LANES, begin = larger(0, smaller(LANES, rows.latest - base));
        int64_t end = larger(begin, smaller(LANES, rows.shortest - base));
        if (begin > 0) one_by_one(values, base, 0, begin);
        weigh(values, keys.value_stride, weights + base, pitch, begin, end, acc);
        if (end < LANES) one_by_one(values, base, end, LANES);
    }
    for (int r = 0; r < R; r++) {
        if (first * LANES >= rows.length[r] || first < partial_of(rows.begin[r])) continue;
        for (int c = 0; c < C; c++) {
            float *out = rows.out[r] + column + c * LANES;
            store(out, first == partial_of(rows.begin[r]) ? acc[r][c] : load(out) + acc[r][c]);
        }
    }
}

// The whole tile. `scores` is scratch of R * pitch floats, pitch >= longest rounded up to 16.
template <int R, class T>
static void attend(const Keys<T> &keys, const Rows &rows, const Form &form, float *scores, int64_t pitch) {
    score<R>(keys, rows, form.scale, scores, pitch);
    float sum[R];
    for (int r = 0; r < R; r++) {
        float maximum;
        sum[r] = soften(scores + r * pitch, rows.begin[r], rows.length[r], form.cap, rows.sink[r], &maximum);
        if (rows.logsumexp[r]) *rows.logsumexp[r] = maximum + (float)std::log((double)sum[r]);
    }
    for (int64_t first = partial_of(rows.earliest); first * LANES < rows.longest; first += VALUE_BLOCKS)
        with_columns(keys.d / LANES,
                     [&]<int C>(int64_t c) { weigh_partial<R, C>(keys, rows, scores, pitch, first, c * LANES); });
    for (int r = 0; r < R; r++)
        for (int64_t i = 0; i < keys.d; i += LANES) store(rows.out[r] + i, load(rows.out[r] + i) / splat(sum[r]));
}

// One query row at `length` positions, R heads from `head` on side by side: head r has its own query [d] and its keys
// and values offset[r] further on. Each head's chains are those of `attend`.
template <int R, int C, class T>
static inline void score_heads(const Keys<T> &keys, const int64_t *offset, const float *queries, int64_t block,
                               v16 scale, float *scores, int64_t pitch) {
    v16 acc[R][C];
    clear(acc);
    const T *const *k = keys.key_blocks + block;
    for (int64_t i = 0; i < keys.d; i++)
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            v16 value = splat(queries[r * keys.d + i]);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r][c] = fma(value, load(k[c] + offset[r] + i * LANES), acc[r][c]);
        }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) store(scores + r * pitch + (block + c) * LANES, acc[r][c] * scale);
}

template <int R, int C, class T>
static inline void weigh_heads(const Keys<T> &keys, const int64_t *offset, const float *weights, int64_t pitch,
                               int64_t first, int64_t begin, int64_t length, int64_t column, float *outputs) {
    v16 acc[R][C];
    clear(acc);
    int64_t end = smaller(length, (first + VALUE_BLOCKS) * LANES);
    for (int64_t position = larger(begin, first * LANES); position < end; position++) {
        const T *values = keys.value_blocks[position / LANES] + position % LANES * keys.value_stride + column;
#pragma GCC unroll 6
        for (int r = 0; r < R; r++) {
            v16 weight = splat(weights[r * pitch + position]);
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r][c] = fma(weight, load(values + offset[r] + c * LANES), acc[r][c]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            float *out = outputs + r * keys.d + column + c * LANES;
            store(out, first == partial_of(begin) ? acc[r][c] : load(out) + acc[r][c]);
        }
}

template <int R, class T>
static void attend_heads(const Keys<T> &keys, const int64_t *offset, const float *queries, int64_t length,
                         const Form &form, int64_t head, float *scores, int64_t pitch, float *outputs) {
    const int64_t begin = form.begin(length), from = begin / LANES;
    const v16 scale = splat(form.scale);
    with_columns(blocks_of(length, LANES) - from, [&]<int C>(int64_t block) {
        score_heads<R, C>(keys, offset, queries, from + block, scale, scores, pitch);
    });
    float sum[R], maximum;
    for (int r = 0; r < R; r++)
        sum[r] = soften(scores + r * pitch, begin, length, form.cap, form.sink(head + r), &maximum);
    for (int64_t first = partial_of(begin); first * LANES < length; first += VALUE_BLOCKS)
        with_columns(keys.d / LANES, [&]<int C>(int64_t c) {
            weigh_heads<R, C>(keys, offset, scores, pitch, first, begin, length, c * LANES, outputs);
        });
    for (int r = 0; r < R; r++)
        for (int64_t i = 0; i < keys.d; i += LANES)
            store(outputs + r * keys.d + i, load(outputs + r * keys.d + i) / splat(sum[r]));
}

// Per-thread scratch, which only grows: an allocation costs more than a decode step.
struct Scratch {
    Buffer<float> scores, keys, values, queries, outputs;
    std::vector<const void *> key_blocks, value_blocks;
    std::vector<int32_t> path;
    static Scratch &mine() {
        static thread_local Scratch scratch;
        return scratch;
    }
};

// Rows of q, k and v of each packed sequence: the first shared[b] positions of sequence b - 1, then its own rows,
// cu_seqlens[b] to cu_seqlens[b + 1]. A traversal of a tree of prefixes has this form. If `shared` is null, every
// sequence consists of its own rows.
struct Sequences {
    const int32_t *cu_seqlens, *shared;
    int64_t count;

    int64_t kept(int64_t b) const { return shared ? shared[b] : 0; }
    int64_t own(int64_t b) const { return cu_seqlens[b + 1] - cu_seqlens[b]; }
    int64_t length(int64_t b) const { return kept(b) + own(b); }

    // rows[i] = the row that holds position i of sequence b, for all i in [0, end).
    void path(int64_t b, int64_t end, int32_t *rows) const {
        for (; end > 0; end = smaller(end, kept(b)), b--)
            for (int64_t i = kept(b); i < end; i++) rows[i] = (int32_t)(cu_seqlens[b] + i - kept(b));
    }

    // Parts of consecutive sequences of about `size` own rows: the first sequence of each, and `count` behind the last.
    std::vector<int64_t> parts(int64_t size) const {
        std::vector<int64_t> first;
        for (int64_t b = 0; b < count; b++)
            if (first.empty() || cu_seqlens[b] - cu_seqlens[first.back()] >= size) first.push_back(b);
        first.push_back(count);
        return first;
    }
};

// Rows path[begin] to path[end - 1], `stride` apart, into blocks [d][16]; lanes past `end` hold zeros.
template <class T>
static void transpose_blocks(const T *rows, int64_t stride, const int32_t *path, int64_t begin, int64_t end, int64_t d,
                             float *blocks) {
    for (int64_t i = begin; i < blocks_of(end, LANES) * LANES; i++) {
        float *out = blocks + i / LANES * LANES * d + i % LANES;
        alignas(64) float row[LANES];
        for (int64_t j = 0; j < d; j += LANES) {
            store(row, i < end ? load(rows + path[i] * stride + j) : splat(0.0f));
            for (int l = 0; l < LANES; l++) out[(j + l) * LANES] = row[l];
        }
    }
}

// The same rows into out[begin] to out[end - 1], each [d].
template <class T>
static void widen(const T *rows, int64_t stride, const int32_t *path, int64_t begin, int64_t end, int64_t d,
                  float *out) {
    for (int64_t i = begin; i < end; i++)
        for (int64_t j = 0; j < d; j += LANES) store(out + i * d + j, load(rows + path[i] * stride + j));
}

template <class T> static void widen(const T *rows, int64_t stride, int64_t count, int64_t d, float *out) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t j = 0; j < d; j += LANES) store(out + i * d + j, load(rows + i * stride + j));
}

}  // namespace sparring
