// Attention of query rows to the keys and values of their own sequence, where these lie in pages or in one piece.
// See attention.h for the order of the arithmetic.
#pragma once

#include "attention.h"

namespace sparring {

// d is the head size of keys and values as they are stored, a multiple of 16; `size` that of q and out, at most d.
struct Heads {
    int64_t H, G, d, size, q_stride;  // q rows are q_stride apart, rows of out H * size
    Form form;
};

template <class T> static inline void widen_query(const T *q, const Heads &s, float *out) {
    for (int64_t j = 0; j < s.d; j += LANES) store(out + j, load_tail(q + j, s.size - j));
}

template <class T> static inline void narrow_output(const float *in, const Heads &s, T *out) {
    for (int64_t j = 0; j < s.size; j += LANES) store_tail(out + j, s.size - j, load(in + j));
}

// Query rows [first, last) of one sequence for one key/value head: (position, head of its group) pairs in tiles of six.
// position_of_first is the position of row `first`; q, out point at the sequence's first row.
template <class T, class K>
static void attend_queries(const Keys<K> &keys, const T *q, T *out, float *logsumexp, const Heads &s, int64_t g,
                           int64_t first, int64_t last, int64_t position_of_first) {
    Scratch &mine = Scratch::mine();
    int64_t group = s.H / s.G, pairs = (last - first) * group;
    int64_t pitch = blocks_of(position_of_first + last - first, LANES) * LANES;
    float *scores = mine.scores.room(TILE_ROWS * pitch);
    float *queries = mine.queries.room(TILE_ROWS * s.d), *outputs = mine.outputs.room(TILE_ROWS * s.d);
    for (int64_t pair = 0; pair < pairs; pair += TILE_ROWS) {
        int64_t count = smaller(TILE_ROWS, pairs - pair);
        T *target[TILE_ROWS];
        Rows rows;
        for (int64_t r = 0; r < count; r++) {
            int64_t row = first + (pair + r) / group, head = g * group + (pair + r) % group;
            widen_query(q + row * s.q_stride + head * s.size, s, queries + r * s.d);
            target[r] = out + (row * s.H + head) * s.size;
            rows.query[r] = queries + r * s.d;
            rows.out[r] = outputs + r * s.d;
            rows.logsumexp[r] = logsumexp ? logsumexp + row * s.H + head : nullptr;
            rows.sink[r] = s.form.sink(head);
            rows.length[r] = position_of_first + row - first + 1;
            rows.begin[r] = s.form.begin(rows.length[r]);
        }
        rows.earliest = rows.begin[0];
        rows.latest = rows.begin[count - 1];
        rows.shortest = rows.length[0];
        rows.longest = rows.length[count - 1];
        with_rows(count, [&]<int R>() { attend<R>(keys, rows, s.form, scores, pitch); });
        for (int64_t r = 0; r < count; r++) narrow_output(outputs + r * s.d, s, target[r]);
    }
}

// One query row, all heads: up to six heads side by side, because one head's chains are too few to keep the processor
// busy. Keys are those of key/value head 0; head g lies g * head_stride further on.
template <class T>
static void attend_row(const Keys<T> &keys, int64_t head_stride, const T *q, T *out, const Heads &s, int64_t length) {
    Scratch &mine = Scratch::mine();
    int64_t group = s.H / s.G, pitch = blocks_of(length, LANES) * LANES;
    float *scores = mine.scores.room(TILE_ROWS * pitch);
    float *queries = mine.queries.room(TILE_ROWS * s.d), *outputs = mine.outputs.room(TILE_ROWS * s.d);
    int64_t together = blocks_of(s.H, blocks_of(s.H, TILE_ROWS));
    for (int64_t head = 0; head < s.H; head += together) {
        int64_t count = smaller(together, s.H - head), offset[TILE_ROWS];
        for (int64_t r = 0; r < count; r++) {
            widen_query(q + (head + r) * s.size, s, queries + r * s.d);
            offset[r] = (head + r) / group * head_stride;
        }
        with_rows(count, [&]<int R>() {
            attend_heads<R>(keys, offset, queries, length, s.form, head, scores, pitch, outputs);
        });
        for (int64_t r = 0; r < count; r++) narrow_output(outputs + r * s.d, s, out + (head + r) * s.size);
    }
}

// Pages of one layer: keys [page][G][page_size / 16][d][16], values [page][G][page_size][d]. Sequence b has its table
// in row slots[b] of `tables` (row b where slots is null) and brings the new rows cu_rows[b]:cu_rows[b + 1].
template <class T> struct Pages {
    T *keys, *values;
    int64_t page_size, num_pages;
    const int32_t *tables, *slots, *cu_rows, *lengths;
    int64_t B, pages_per_table;

    const int32_t *table(int64_t b) const { return tables + (slots ? slots[b] : b) * pages_per_table; }

    // The position of the first new row of sequence b.
    int64_t earlier(int64_t b) const { return lengths[b] - (cu_rows[b + 1] - cu_rows[b]); }

    // The first sequence whose new rows do not fit its length or whose table, with room for `later` more, names no page
    // of ours; or -1.
    int64_t first_bad(int64_t later = 0) const {
        for (int64_t b = 0; b < B; b++) {
            int64_t needed = blocks_of(lengths[b] + later, page_size);
            if (cu_rows[b + 1] < cu_rows[b] || cu_rows[b + 1] - cu_rows[b] > lengths[b] || needed > pages_per_table)
                return b;
            for (int64_t i = 0; i < needed; i++)
                if (table(b)[i] < 0 || table(b)[i] >= num_pages) return b;
        }
        return -1;
    }

    int64_t block_offset(int64_t b, int64_t block, int64_t g, const Heads &s) const {
        int64_t position = block * LANES, page = table(b)[position / page_size];
        return ((page * s.G + g) * page_size + position % page_size) * s.d;
    }

    // The first `length` positions of sequence b for key/value head g, in this thread's scratch.
    Keys<T> gather(int64_t b, int64_t g, int64_t length, const Heads &s) const {
        Scratch &mine = Scratch::mine();
        int64_t num_blocks = blocks_of(length, LANES);
        mine.key_blocks.resize(num_blocks);
        mine.value_blocks.resize(num_blocks);
        for (int64_t i = 0; i < num_blocks; i++) {
            int64_t block = block_offset(b, i, g, s);
            mine.key_blocks[i] = keys + block;
            mine.value_blocks[i] = values + block;
        }
        return {(const T *const *)mine.key_blocks.data(), (const T *const *)mine.value_blocks.data(), s.d, s.d};
    }

    // One new row: k, v [G][size]. Entries past `size` stay the zeros that the pages began with.
    void write(const T *k, const T *v, const Heads &s, int64_t b, int64_t position) const {
        for (int64_t g = 0; g < s.G; g++) {
            int64_t block = block_offset(b, position / LANES, g, s), lane = position % LANES;
            for (int64_t i = 0; i < s.size; i++) keys[block + i * LANES + lane] = k[g * s.size + i];
            memcpy(values + block + lane * s.d, v + g * s.size, s.size * sizeof(T));
        }
    }

    // Rows [first, last) of sequence b, counted from its first new row, for all heads; q, out point at that row.
    void attend(const T *q, T *out, const Heads &s, int64_t b, int64_t first, int64_t last) const {
        int64_t begin = earlier(b);
        if (last - first == 1) {
            attend_row(gather(b, 0, begin + last, s), page_size * s.d, q + first * s.q_stride,
                       out + first * s.H * s.size, s, begin + last);
            return;
        }
        for (int64_t g = 0; g < s.G; g++)
            attend_queries<T>(gather(b, g, begin + last, s), q, out, nullptr, s, g, first, last, begin + first);
    }
};

}  // namespace sparring
