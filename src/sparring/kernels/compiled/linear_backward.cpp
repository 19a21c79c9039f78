// Gradients of y = x W^T + bias: of x and of W as matrix products, of the bias as sums over rows; in float32.
//
// An element is a sum of partial sums, one for each block of 128 consecutive terms, each an ascending chain of fused
// multiply-adds from zero; the blocks are added in order. Threads divide elements, never a sum: no bit depends on the
// number of threads, and the gradient of a row does not depend on other rows. On a processor that multiplies pairs of
// bfloat16, terms may be pairs.
#include "linear.h"

namespace sparring {
namespace {

constexpr int64_t OPERATIONS_OF_ONE = 2000000;  // as in linear.cpp
constexpr int64_t PANELS_AT_ONCE =
    4;  // for which rows are laid once; the sums of so many stay in the second-level cache
constexpr int64_t STRIDE =
    ROWS_PER_TASK + LANES;  // of rows laid across: an odd number of cache lines, which spread over the sets

// out [R][C] <- sum over i of a(r, i) b(i, c). b is [I][C], rows b_stride apart. a is [R][I], or [I][R] where it is
// turned, rows a_stride apart.
template <class T> struct Sums {
    const T *a, *b;
    T *out;
    int64_t a_stride, b_stride, R, C, I;
};

template <class E> constexpr int64_t terms_of = 1;  // of one element of what is multiplied
#ifdef SPARRING_PAIRS
template <> constexpr int64_t terms_of<pair> = 2;
#endif

// Terms [begin, begin + depth) of `count` columns from `column` on, as they are multiplied: [depth][stride], zeros past
// `count` up to a whole vector.
template <class T>
static inline void lay_across(const T *from, int64_t from_stride, int64_t begin, int64_t depth, int64_t column,
                              int64_t count, float *out, int64_t stride) {
    for (int64_t i = 0; i < depth; i++)
        for (int64_t c = 0; c < count; c += LANES)
            store(out + i * stride + c, load_tail(from + (begin + i) * from_stride + column + c, count - c));
}

// Terms [begin, begin + depth) of one row.
template <class T> static inline void lay_along(const T *row, int64_t begin, int64_t depth, float *out) {
    for (int64_t i = 0; i < depth; i += LANES) store_tail(out + i, depth - i, load_tail(row + begin + i, depth - i));
}

#ifdef SPARRING_PAIRS
// The same of pairs of terms; `depth` counts terms, and one without a partner is multiplied with zero.
#ifdef SPARRING_AVX512
static inline __m512i sixteen(const bf16 *from, int64_t count) {
    __mmask16 in = count < LANES ? (__mmask16)((1 << count) - 1) : (__mmask16)~0;
    return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(in, from));
}

static inline void pair_up(const bf16 *even, const bf16 *odd, int64_t count, pair *out) {
    __m512i upper = odd ? sixteen(odd, count) : _mm512_setzero_si512();
    _mm512_storeu_si512(out, _mm512_or_si512(sixteen(even, count), _mm512_slli_epi32(upper, 16)));
}
#else
static inline void pair_up(const bf16 *even, const bf16 *odd, int64_t count, pair *out) {
    for (int64_t i = 0; i < LANES; i++) out[i] = i < count ? pair{even[i], odd ? odd[i] : bf16{}} : pair{};
}
#endif

static inline void lay_across(const bf16 *from, int64_t from_stride, int64_t begin, int64_t depth, int64_t column,
                              int64_t count, pair *out, int64_t stride) {
    for (int64_t i = 0; i < depth; i += 2)
        for (int64_t c = 0; c < count; c += LANES) {
            const bf16 *even = from + (begin + i) * from_stride + column + c;
            pair_up(even, i + 1 < depth ? even + from_stride : nullptr, count - c, out + i / 2 * stride + c);
        }
}

static inline void lay_along(const bf16 *row, int64_t begin, int64_t depth, pair *out) {
    memcpy((void *)out, row + begin, depth * sizeof(bf16));
    if (depth % 2) out[depth / 2].odd = {};
}
#endif

// One tile over one block of terms: total [R][PANEL] becomes, or grows by, the block's sums.
template <bool TURNED, int R, int C, class E>
static inline void tile_sums(const E *a, const E *b, float *total, int64_t depth, bool first) {
    v16 acc[R][C];
    clear(acc);
    accumulate(acc, 0, depth, [=](int r, int64_t i) { return TURNED ? a[i * STRIDE + r] : a[r * K_BLOCK + i]; },
               [=](int64_t i, int c) { return load(b + i * PANEL + c * LANES); });
#pragma GCC unroll 6
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) {
            float *sum = total + r * PANEL + c * LANES;
            store(sum, first ? acc[r][c] : load(sum) + acc[r][c]);
        }
}

// Rows [row, row + rows) and columns from `column` on; E is what is multiplied: floats, or pairs of bfloat16.
template <bool TURNED, class E, class T>
static void sum_block(const Sums<T> &s, int64_t row, int64_t rows, int64_t column, int64_t columns) {
    static thread_local Buffer<float> for_totals;
    static thread_local Buffer<E> for_a, for_b;
    constexpr int64_t TERMS = terms_of<E>;
    constexpr int64_t PANEL_TOTAL = ROWS_PER_TASK * PANEL;
    int64_t panels = blocks_of(columns, PANEL);
    float *totals = for_totals.room(PANELS_AT_ONCE * PANEL_TOTAL);
    E *a = for_a.room(K_BLOCK * STRIDE), *b = for_b.room(K_BLOCK * PANEL);
    for (int64_t begin = 0; begin < s.I; begin += TERMS * K_BLOCK) {
        int64_t terms = smaller(TERMS * K_BLOCK, s.I - begin), depth = blocks_of(terms, TERMS);
        if (TURNED) lay_across(s.a, s.a_stride, begin, terms, row, rows, a, STRIDE);
        else
            for (int64_t r = 0; r < rows; r++) lay_along(s.a + (row + r) * s.a_stride, begin, terms, a + r * K_BLOCK);
        for (int64_t panel = 0; panel < panels; panel++) {
            int64_t count = smaller(PANEL, columns - panel * PANEL), vectors = blocks_of(count, LANES);
            lay_across(s.b, s.b_stride, begin, terms, column + panel * PANEL, count, b, PANEL);
            for (int64_t r = 0; r < rows; r += TILE_ROWS)
                with_rows(smaller(rows - r, TILE_ROWS), [&]<int R>() {
                    const E *in = TURNED ? a + r : a + r * K_BLOCK;
                    float *total = totals + panel * PANEL_TOTAL + r * PANEL;
                    int64_t v = 0;
                    for (; v + WIDE <= vectors; v += WIDE)
                        tile_sums<TURNED, R, WIDE>(in, b + v * LANES, total + v * LANES, depth, begin == 0);
                    for (; v < vectors; v++)
                        tile_sums<TURNED, R, 1>(in, b + v * LANES, total + v * LANES, depth, begin == 0);
                });
        }
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += LANES) {
            v16 sum = s.I ? load(totals + c / PANEL * PANEL_TOTAL + r * PANEL + c % PANEL) : splat(0.0f);
            store_tail(s.out + (row + r) * s.C + column + c, columns - c, sum);
        }
}

template <bool TURNED, class E, class T> static void sum_all(const Sums<T> &s, int threads) {
    if (2 * s.R * s.C * s.I < OPERATIONS_OF_ONE) threads = 1;
    int64_t all = blocks_of(s.C, PANEL), panels = blocks_of(all, blocks_of(all, PANELS_AT_ONCE)), rows = ROWS_PER_TASK;
    auto tasks = [&] { return blocks_of(s.R, rows) * blocks_of(all, panels); };
    while (threads > 1 && panels > 1 && tasks() < 4 * threads) panels = blocks_of(panels, 2);
    while (threads > 1 && rows > 4 * TILE_ROWS && tasks() < 4 * threads)
        rows = blocks_of(rows / 2, TILE_ROWS) * TILE_ROWS;
    if (s.R > 0) rows = smaller(rows, blocks_of(blocks_of(s.R, blocks_of(s.R, rows)), TILE_ROWS) * TILE_ROWS);
    int64_t groups = blocks_of(all, panels), width = panels * PANEL;
    parallel_for(groups * blocks_of(s.R, rows), threads, [=](int64_t task) {
        int64_t row = task / groups * rows, column = task % groups * width;
        sum_block<TURNED, E>(s, row, smaller(rows, s.R - row), column, smaller(width, s.C - column));
    });
}

template <bool TURNED> static void sums(const Sums<float> &s, int, int threads) { sum_all<TURNED, float>(s, threads); }

template <bool TURNED> static void sums(const Sums<bf16> &s, int pairs, int threads) {
#ifdef SPARRING_PAIRS
    if (pairs) return sum_all<TURNED, pair>(s, threads);
#endif
    sum_all<TURNED, float>(s, threads);
}

// In partial sums of 64 rows, added in order; threads share out columns.
template <class T> static void sum_rows(const T *x, int64_t stride, float *out, int64_t N, int64_t M, int threads) {
    constexpr int64_t ROWS_PER_PARTIAL = 64, COLUMNS = 16 * LANES, GRAIN = 65536;
    parallel_for(blocks_of(M, COLUMNS), N * M < GRAIN ? 1 : threads, [=](int64_t task) {
        int64_t end = smaller(M, (task + 1) * COLUMNS);
        for (int64_t column = task * COLUMNS; column < end; column += LANES)
            store_tail(out + column, end - column, splat(0.0f));
        for (int64_t first = 0; first < N; first += ROWS_PER_PARTIAL) {
            alignas(64) float partial[COLUMNS] = {};
            for (int64_t n = first; n < smaller(N, first + ROWS_PER_PARTIAL); n++)
                for (int64_t column = task * COLUMNS, c = 0; column < end; column += LANES, c += LANES)
                    store(partial + c, load(partial + c) + load_tail(x + n * stride + column, end - column));
            for (int64_t column = task * COLUMNS, c = 0; column < end; column += LANES, c += LANES)
                store_tail(out + column, end - column, load_tail(out + column, end - column) + load(partial + c));
        }
    });
}

}  // namespace

// dx [N, K] <- dy [N, M] W [M, K], contiguous but for dy, whose rows are `stride` apart; `pairs`: of bfloat16, where
// this build multiplies them. dw [M, K] <- dy^T x [N, K]. db [M] <- sums of dy over rows.
#define SPARRING_LINEAR_BACKWARD(NAME, T)                                                                              \
    void sparring_input_gradient_##NAME(const T *dy, int64_t stride, const T *weight, T *dx, int64_t N, int64_t M,     \
                                        int64_t K, int pairs, int threads) {                                           \
        sums<false>(Sums<T>{dy, weight, dx, stride, K, N, K, M}, pairs, threads);                                      \
    }                                                                                                                  \
    void sparring_weight_gradient_##NAME(const T *dy, int64_t stride, const T *x, T *dw, int64_t N, int64_t M,         \
                                         int64_t K, int pairs, int threads) {                                          \
        sums<true>(Sums<T>{dy, x, dw, stride, K, M, K, N}, pairs, threads);                                            \
    }                                                                                                                  \
    void sparring_sum_rows_##NAME(const T *dy, int64_t stride, float *db, int64_t N, int64_t M, int threads) {         \
        sum_rows(dy, stride, db, N, M, threads);                                                                       \
    }

extern "C" {
SPARRING_LINEAR_BACKWARD(f32, float)
SPARRING_LINEAR_BACKWARD(bf16, bf16)
}
}  // namespace sparring
