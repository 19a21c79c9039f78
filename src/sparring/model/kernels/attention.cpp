// Causal attention over packed sequences and over KV pages. See attention.h for the order of the arithmetic.
#include "attention.h"
#include "parallel.h"

namespace sparring {
namespace {

constexpr int64_t QUERIES_PER_TASK = 24;

struct Shape {
    int64_t H, G, d;
    float scale;
};

// Query rows [first, last) of one sequence for one key/value head: (position, head of its group) pairs in tiles of six.
// position_of_first is the position of row `first`; q, out point at the sequence's first row.
template <class T>
static void attend_queries(const Keys<float> *wide, const Keys<T> *narrow, const T *q, T *out, float *logsumexp,
                           const Shape &s, int64_t g, int64_t first, int64_t last, int64_t position_of_first) {
    Scratch &mine = Scratch::mine();
    int64_t group = s.H / s.G, pairs = (last - first) * group;
    int64_t pitch = blocks_of(position_of_first + last - first, LANES) * LANES;
    float *scores = Scratch::room(mine.scores, TILE_ROWS * pitch);
    float *queries = Scratch::room(mine.queries, TILE_ROWS * s.d), *outputs = Scratch::room(mine.outputs, TILE_ROWS * s.d);
    for (int64_t pair = 0; pair < pairs; pair += TILE_ROWS) {
        int64_t count = smaller(TILE_ROWS, pairs - pair), offset[TILE_ROWS];
        Rows rows;
        for (int64_t r = 0; r < count; r++) {
            int64_t row = first + (pair + r) / group, head = g * group + (pair + r) % group;
            offset[r] = (row * s.H + head) * s.d;
            widen(q + offset[r], 0, 1, s.d, queries + r * s.d);
            rows.query[r] = queries + r * s.d;
            rows.out[r] = outputs + r * s.d;
            rows.logsumexp[r] = logsumexp ? logsumexp + row * s.H + head : nullptr;
            rows.length[r] = position_of_first + row - first + 1;
        }
        rows.shortest = rows.length[0];
        rows.longest = rows.length[count - 1];
        with_rows(count, [&]<int R>() {
            if (wide) attend<R>(*wide, rows, s.scale, scores, pitch);
            else attend<R>(*narrow, rows, s.scale, scores, pitch);
        });
        for (int64_t r = 0; r < count; r++)
            for (int64_t j = 0; j < s.d; j += LANES) store(out + offset[r] + j, load(outputs + r * s.d + j));
    }
}

// One part: sequences [begin, end) for one key/value head. What a sequence shares with the one before it is already in place.
template <class T>
static void packed_part(const T *q, const T *k, const T *v, T *out, float *logsumexp, const Sequences &sequences, int64_t begin,
                        int64_t end, const Shape &s, int64_t g) {
    int64_t longest = 0, stride = s.G * s.d;
    for (int64_t b = begin; b < end; b++) longest = larger(longest, sequences.length(b));
    Scratch &mine = Scratch::mine();
    int64_t num_blocks = blocks_of(longest, LANES);
    float *keys = Scratch::room(mine.keys, num_blocks * LANES * s.d);
    float *values = Scratch::room(mine.values, num_blocks * LANES * s.d);
    mine.path.resize(longest);
    mine.key_blocks.resize(num_blocks);
    mine.value_blocks.resize(num_blocks);
    for (int64_t i = 0; i < num_blocks; i++) {
        mine.key_blocks[i] = keys + i * LANES * s.d;
        mine.value_blocks[i] = values + i * LANES * s.d;
    }
    Keys<float> wide{(const float *const *)mine.key_blocks.data(), (const float *const *)mine.value_blocks.data(), s.d, s.d};
    sequences.path(begin, sequences.kept(begin), mine.path.data());
    for (int64_t b = begin; b < end; b++) {
        int64_t kept = sequences.kept(b), length = sequences.length(b), start = sequences.cu_seqlens[b];
        int64_t from = b == begin ? 0 : kept;
        for (int64_t i = kept; i < length; i++) mine.path[i] = (int32_t)(start + i - kept);
        transpose_blocks(k + g * s.d, stride, mine.path.data(), from, length, s.d, keys);
        widen(v + g * s.d, stride, mine.path.data(), from, length, s.d, values);
        attend_queries<T>(&wide, nullptr, q + start * s.H * s.d, out + start * s.H * s.d,
                          logsumexp ? logsumexp + start * s.H : nullptr, s, g, 0, length - kept, kept);
    }
}

template <class T>
static void packed(const T *q, const T *k, const T *v, T *out, float *logsumexp, const Sequences &sequences, const Shape &s,
                   int threads) {
    int64_t total = sequences.cu_seqlens[sequences.count];
    if (total < 32) threads = 1;
    // A part begins by laying out all keys of its first sequence, so there are only as many as keep the threads busy.
    std::vector<int64_t> parts = sequences.parts(threads == 1 ? total : total * s.G / (8 * threads) + 1);
    parallel_for((int64_t)(parts.size() - 1) * s.G, threads, [&](int64_t task) {
        int64_t part = task / s.G;
        packed_part(q, k, v, out, logsumexp, sequences, parts[part], parts[part + 1], s, task % s.G);
    });
}

// Pages of one layer: keys [page][G][page_size / 16][d][16], values [page][G][page_size][d].
template <class T> struct Pages {
    T *keys, *values;
    int64_t page_size;
    const int32_t *tables, *cu_rows, *lengths;
    int64_t B, pages_per_table, num_pages;

    // The first sequence whose new rows do not fit its length or whose table names no page of ours, or -1.
    int64_t first_bad() const {
        for (int64_t b = 0; b < B; b++) {
            int64_t needed = blocks_of(lengths[b], page_size);
            if (cu_rows[b + 1] < cu_rows[b] || cu_rows[b + 1] - cu_rows[b] > lengths[b] || needed > pages_per_table) return b;
            for (int64_t i = 0; i < needed; i++)
                if (tables[b * pages_per_table + i] < 0 || tables[b * pages_per_table + i] >= num_pages) return b;
        }
        return -1;
    }

    int64_t block_offset(int64_t b, int64_t block, int64_t g, const Shape &s) const {
        int64_t position = block * LANES, page = tables[b * pages_per_table + position / page_size];
        return ((page * s.G + g) * page_size + position % page_size) * s.d;
    }
};

template <class T>
static void write_row(const Pages<T> &p, const T *k, const T *v, const Shape &s, int64_t b, int64_t row, int64_t position) {
    for (int64_t g = 0; g < s.G; g++) {
        int64_t block = p.block_offset(b, position / LANES, g, s), lane = position % LANES;
        const T *key = k + (row * s.G + g) * s.d;
        for (int64_t i = 0; i < s.d; i++) p.keys[block + i * LANES + lane] = key[i];
        memcpy(p.values + block + lane * s.d, v + (row * s.G + g) * s.d, s.d * sizeof(T));
    }
}

struct Task {
    int32_t b, g;
    int64_t first, last;  // rows within the sequence's new rows
};

template <class T>
static void paged(const T *q, const T *k, const T *v, T *out, const Pages<T> &p, const Shape &s, int threads) {
    std::vector<Task> tasks;
    int64_t work = 0;
    for (int64_t b = 0; b < p.B; b++) {
        int64_t count = p.cu_rows[b + 1] - p.cu_rows[b];
        work += count * p.lengths[b] * s.H * s.d;
        for (int64_t g = 0; g < s.G; g++)
            for (int64_t first = 0; first < count; first += QUERIES_PER_TASK)
                tasks.push_back({(int32_t)b, (int32_t)g, first, smaller(count, first + QUERIES_PER_TASK)});
    }
    if (work < 100000) threads = 1;
    parallel_for(p.B, threads, [&](int64_t b) {
        int64_t begin = p.cu_rows[b], count = p.cu_rows[b + 1] - begin;
        for (int64_t i = 0; i < count; i++) write_row(p, k, v, s, b, begin + i, p.lengths[b] - count + i);
    });
    parallel_for((int64_t)tasks.size(), threads, [&](int64_t t) {
        Task task = tasks[t];
        Scratch &mine = Scratch::mine();
        int64_t begin = p.cu_rows[task.b], earlier = p.lengths[task.b] - (p.cu_rows[task.b + 1] - begin);
        int64_t num_blocks = blocks_of(earlier + task.last, LANES);
        mine.key_blocks.resize(num_blocks);
        mine.value_blocks.resize(num_blocks);
        for (int64_t i = 0; i < num_blocks; i++) {
            int64_t block = p.block_offset(task.b, i, task.g, s);
            mine.key_blocks[i] = p.keys + block;
            mine.value_blocks[i] = p.values + block;
        }
        Keys<T> narrow{(const T *const *)mine.key_blocks.data(), (const T *const *)mine.value_blocks.data(), s.d, s.d};
        attend_queries<T>(nullptr, &narrow, q + begin * s.H * s.d, out + begin * s.H * s.d, nullptr, s, task.g, task.first,
                          task.last, earlier + task.first);
    });
}

}  // namespace

// logsumexp [N, H] may be null. The paged call writes the new rows first, then attends; it returns -1, or the first
// sequence whose table is wrong, having done nothing.
#define SPARRING_ATTENTION(NAME, T)                                                                                      \
    void sparring_attention_packed_##NAME(const T *q, const T *k, const T *v, T *out, float *logsumexp,                  \
                                          const int32_t *cu_seqlens, const int32_t *shared, int64_t B, int64_t H,        \
                                          int64_t G, int64_t d, float scale, int threads) {                              \
        packed<T>(q, k, v, out, logsumexp, Sequences{cu_seqlens, shared, B}, Shape{H, G, d, scale}, threads);            \
    }                                                                                                                    \
    int64_t sparring_attention_paged_##NAME(const T *q, const T *k, const T *v, T *out, T *keys, T *values,              \
                                            int64_t num_pages, int64_t page_size, const int32_t *tables,                 \
                                            const int32_t *cu_rows, const int32_t *lengths, int64_t B,                   \
                                            int64_t pages_per_table, int64_t H, int64_t G, int64_t d, float scale,       \
                                            int threads) {                                                               \
        Pages<T> pages{keys, values, page_size, tables, cu_rows, lengths, B, pages_per_table, num_pages};                \
        int64_t bad = pages.first_bad();                                                                                 \
        if (bad < 0) paged<T>(q, k, v, out, pages, Shape{H, G, d, scale}, threads);                                      \
        return bad;                                                                                                      \
    }

extern "C" {
SPARRING_ATTENTION(f32, float)
SPARRING_ATTENTION(bf16, bf16)
}
}  // namespace sparring
