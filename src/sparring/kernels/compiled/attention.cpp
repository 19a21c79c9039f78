// Causal attention over packed sequences and over KV pages. See attention.h for the order of the arithmetic.
#include "paged.h"
#include "parallel.h"

namespace sparring {
namespace {

constexpr int64_t QUERIES_PER_TASK = 24;

// One part: sequences [begin, end) for one key/value head. What a sequence shares with the one before it is already in
// place.
template <class T>
static void packed_part(const T *q, const T *k, const T *v, T *out, float *logsumexp, const Sequences &sequences,
                        int64_t begin, int64_t end, const Heads &s, int64_t g) {
    int64_t longest = 0, stride = s.G * s.d;
    for (int64_t b = begin; b < end; b++) longest = larger(longest, sequences.length(b));
    Scratch &mine = Scratch::mine();
    int64_t num_blocks = blocks_of(longest, LANES);
    float *keys = mine.keys.room(num_blocks * LANES * s.d);
    float *values = mine.values.room(num_blocks * LANES * s.d);
    mine.path.resize(longest);
    mine.key_blocks.resize(num_blocks);
    mine.value_blocks.resize(num_blocks);
    for (int64_t i = 0; i < num_blocks; i++) {
        mine.key_blocks[i] = keys + i * LANES * s.d;
        mine.value_blocks[i] = values + i * LANES * s.d;
    }
    Keys<float> wide{(const float *const *)mine.key_blocks.data(), (const float *const *)mine.value_blocks.data(), s.d,
                     s.d};
    sequences.path(begin, sequences.kept(begin), mine.path.data());
    for (int64_t b = begin; b < end; b++) {
        int64_t kept = sequences.kept(b), length = sequences.length(b), start = sequences.cu_seqlens[b];
        int64_t from = b == begin ? 0 : kept;
        for (int64_t i = kept; i < length; i++) mine.path[i] = (int32_t)(start + i - kept);
        transpose_blocks(k + g * s.d, stride, mine.path.data(), from, length, s.d, keys);
        widen(v + g * s.d, stride, mine.path.data(), from, length, s.d, values);
        attend_queries<T>(wide, q + start * s.H * s.d, out + start * s.H * s.d,
                          logsumexp ? logsumexp + start * s.H : nullptr, s, g, 0, length - kept, kept);
    }
}

template <class T>
static void packed(const T *q, const T *k, const T *v, T *out, float *logsumexp, const Sequences &sequences,
                   const Heads &s, int threads) {
    int64_t total = sequences.cu_seqlens[sequences.count];
    if (total < 32) threads = 1;
    // A part begins by laying out all keys of its first sequence, so there are only as many as keep the threads busy.
    std::vector<int64_t> parts = sequences.parts(threads == 1 ? total : total * s.G / (8 * threads) + 1);
    parallel_for((int64_t)(parts.size() - 1) * s.G, threads, [&](int64_t task) {
        int64_t part = task / s.G;
        packed_part(q, k, v, out, logsumexp, sequences, parts[part], parts[part + 1], s, task % s.G);
    });
}

struct Task {
    int64_t b, first, last;  // rows within the sequence's new rows
};

template <class T>
static void paged(const T *q, const T *k, const T *v, T *out, const Pages<T> &p, const Heads &s, int threads) {
    std::vector<Task> tasks;
    int64_t work = 0;
    for (int64_t b = 0; b < p.B; b++) {
        int64_t count = p.cu_rows[b + 1] - p.cu_rows[b];
        work += count * p.lengths[b] * s.H * s.d;
        for (int64_t first = 0; first < count; first += QUERIES_PER_TASK)
            tasks.push_back({b, first, smaller(count, first + QUERIES_PER_TASK)});
    }
    if (work < 100000) threads = 1;
    parallel_for(p.B, threads, [&](int64_t b) {
        for (int64_t i = p.cu_rows[b]; i < p.cu_rows[b + 1]; i++)
            p.write(k + i * s.G * s.size, v + i * s.G * s.size, s, b, p.earlier(b) + i - p.cu_rows[b]);
    });
    parallel_for((int64_t)tasks.size(), threads, [&](int64_t t) {
        Task task = tasks[t];
        int64_t begin = p.cu_rows[task.b];
        p.attend(q + begin * s.q_stride, out + begin * s.H * s.size, s, task.b, task.first, task.last);
    });
}

}  // namespace

// logsumexp [N, H] may be null. The paged call writes the new rows first, then attends; it returns -1, or the first
// sequence whose table is wrong, having done nothing.
#define SPARRING_ATTENTION(NAME, T)                                                                                    \
    void sparring_attention_packed_##NAME(const T *q, const T *k, const T *v, T *out, float *logsumexp,                \
                                          const int32_t *cu_seqlens, const int32_t *shared, int64_t B, int64_t H,      \
                                          int64_t G, int64_t d, float scale, float cap, int64_t window,                \
                                          const float *sinks, int threads) {                                           \
        packed<T>(q, k, v, out, logsumexp, Sequences{cu_seqlens, shared, B},                                           \
                  Heads{H, G, d, d, H * d, {scale, cap, window, sinks}}, threads);                                     \
    }                                                                                                                  \
    int64_t sparring_attention_paged_##NAME(                                                                           \
        const T *q, const T *k, const T *v, T *out, T *keys, T *values, int64_t num_pages, int64_t page_size,          \
        const int32_t *tables, const int32_t *cu_rows, const int32_t *lengths, int64_t B, int64_t pages_per_table,     \
        int64_t H, int64_t G, int64_t d, float scale, float cap, int64_t window, const float *sinks, int threads) {    \
        Pages<T> pages{keys, values, page_size, num_pages, tables, nullptr, cu_rows, lengths, B, pages_per_table};     \
        int64_t bad = pages.first_bad();                                                                               \
        if (bad < 0) paged<T>(q, k, v, out, pages, Heads{H, G, d, d, H * d, {scale, cap, window, sinks}}, threads);    \
        return bad;                                                                                                    \
    }

extern "C" {
SPARRING_ATTENTION(f32, float)
SPARRING_ATTENTION(bf16, bf16)
}
}  // namespace sparring
