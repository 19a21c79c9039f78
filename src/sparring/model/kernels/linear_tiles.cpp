// Products of many rows on AMX tiles, their gradients, and the packing of weights for them. See tiles.h for the arithmetic.
#include "linear.h"
#include "parallel.h"

namespace sparring {
namespace {

#ifdef SPARRING_AMX
constexpr int64_t BLOCK_BYTES = 1500000;  // of both operands of a weight gradient at a time: they stay in the second-level cache

// Rows of y in tasks of whole tiles, every task over all columns, unless the rows are few.
template <class X, class Y>
static void product(const Weight &w, const X *x, Y *y, int64_t N, int threads) {
    if (w.M * w.K < 200000 && N * w.M * w.K < 4000000) threads = 1;
    int64_t rows = ROWS_PER_TASK, panels = blocks_of(w.M, PANEL), columns = panels;
    while (rows > 2 * TILE && blocks_of(N, rows) < 4 * threads) rows = blocks_of(rows / 2, 2 * TILE) * 2 * TILE;
    if (blocks_of(N, rows) < threads) columns = blocks_of(panels, threads);
    int64_t groups = blocks_of(panels, columns);
    parallel_for(groups * blocks_of(N, rows), threads, [=](int64_t task) {
        int64_t row = task / groups * rows, first = task % groups * columns;
        Weight part = columns_of(w, first, smaller(panels, first + columns));
        linear_rows(part, x + row * w.K, y + row * w.M + first * PANEL, w.M, smaller(rows, N - row));
    });
}

static inline void put_pairs(bf16 *out, __m256i even, __m256i odd) {
    __m512i pairs = _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
    _mm512_storeu_si512(out, pairs);
}

static inline v16 row_part(const float *x, int64_t width, int64_t rows, int64_t row, int64_t column) {
    return row < rows && column < width ? load_tail(x + row * width + column, width - column) : splat(0.0f);
}

// One block of 32 rows of x [rows][width], 64 columns: out [planes][16 pairs of rows][64][2].
static void pair_rows(const float *x, int64_t width, int64_t rows, int64_t block, int64_t panel, bf16 *out) {
    for (int64_t pair = 0; pair < TILE; pair++)
        for (int64_t i = 0; i < PANEL; i += LANES) {
            int64_t row = block * DEPTH + 2 * pair, column = panel * PANEL + i;
            Halves even = split(row_part(x, width, rows, row, column)), odd = split(row_part(x, width, rows, row + 1, column));
            for (int plane = 0; plane < PLANES; plane++)
                put_pairs(out + plane * PANEL_BLOCK + (pair * PANEL + i) * 2, even.part[plane], odd.part[plane]);
        }
}

// [16][16] units of 32 bits, rows `stride` elements of bf16 apart -> transposed, rows 32 elements apart.
static void transpose_units(const bf16 *in, int64_t stride, bf16 *out) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(in + i * stride);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + 2 + j]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + 2 + j]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            b[i + j] = _mm512_shuffle_i32x4(a[i + j], a[i + 4 + j], 0x88);
            b[i + 4 + j] = _mm512_shuffle_i32x4(a[i + j], a[i + 4 + j], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        _mm512_storeu_si512(out + j * DEPTH, _mm512_shuffle_i32x4(b[j], b[8 + j], 0x88));
        _mm512_storeu_si512(out + (8 + j) * DEPTH, _mm512_shuffle_i32x4(b[j], b[8 + j], 0xdd));
    }
}

// Operands of a weight gradient for a block of rows: y as tiles of its transpose [ceil(M / 16)][blocks][planes][16][32],
// x in pairs [ceil(K / 64)][blocks][planes][16][64][2].
struct Gradient {
    const float *x, *dy;
    float *dw;  // [M padded to 32][K padded to 32]
    int64_t M, K;
    bf16 *a, *b;
};

static void lay_transposed(const Gradient &g, int64_t first, int64_t rows, int64_t blocks, int64_t panel) {
    alignas(64) bf16 pairs[PLANES * PANEL_BLOCK];
    for (int64_t block = 0; block < blocks; block++) {
        pair_rows(g.dy + first * g.M, g.M, rows, block, panel, pairs);
        for (int64_t tile = panel * (PANEL / TILE); tile < smaller(padded(g.M) / TILE, (panel + 1) * (PANEL / TILE)); tile++)
            for (int64_t plane = 0; plane < PLANES; plane++)
                transpose_units(pairs + plane * PANEL_BLOCK + tile % (PANEL / TILE) * TILE * 2, PANEL * 2,
                                g.a + ((tile * blocks + block) * PLANES + plane) * TILE_ELEMENTS);
    }
}

// dw grows by a block of rows: 32 rows of it (m), all columns.
static void add_product(const Gradient &g, int64_t blocks, int64_t m, bool fresh) {
    int64_t width = padded(g.K), step = PLANES * TILE_ELEMENTS;
    shape_tiles(TILE, TILE);
    for (int64_t k = 0; k < width; k += 2 * TILE) {
        const bf16 *b = g.b + k / PANEL * blocks * PLANES * PANEL_BLOCK + k % PANEL * 2;
        Operands o{g.a + m / TILE * blocks * step, b, blocks * step, TILE_ELEMENTS, step, 2 * TILE, PANEL_BLOCK,
                   PLANES * PANEL_BLOCK, PANEL * 4};
        float *sums = g.dw + m * width + k;
        if (fresh) clear_sums<true>();
        else load_sums(sums, width);
        multiply_split<true>(o, blocks);
        store_sums(sums, width, true);
    }
    _tile_release();
}

static void weight_gradient(Gradient g, int64_t N, int threads) {
    static thread_local std::vector<bf16> rows_of_y, rows_of_x;
    int64_t m_panels = blocks_of(g.M, PANEL), k_panels = blocks_of(g.K, PANEL);
    int64_t size = BLOCK_BYTES / (PLANES * 2 * PANEL * (m_panels + k_panels)) / DEPTH * DEPTH;
    size = smaller(larger(size, 4 * DEPTH), padded(N));
    rows_of_y.resize(m_panels * PANEL * size * PLANES);
    rows_of_x.resize(k_panels * PANEL * size * PLANES);
    g.a = rows_of_y.data();
    g.b = rows_of_x.data();
    if (N * g.M * g.K < 4000000) threads = 1;
    for (int64_t first = 0; first < N; first += size) {
        int64_t rows = smaller(size, N - first), blocks = blocks_of(rows, DEPTH);
        parallel_for(m_panels + k_panels, threads, [=](int64_t task) {
            if (task < m_panels) return lay_transposed(g, first, rows, blocks, task);
            int64_t panel = task - m_panels;
            for (int64_t block = 0; block < blocks; block++)
                pair_rows(g.x + first * g.K, g.K, rows, block, panel, g.b + (panel * blocks + block) * PLANES * PANEL_BLOCK);
        });
        parallel_for(padded(g.M) / (2 * TILE), threads, [=](int64_t task) { add_product(g, blocks, task * 2 * TILE, first == 0); });
    }
}
#else
template <class X, class Y> static void product(const Weight &, const X *, Y *, int64_t, int) {}
#endif

}  // namespace

extern "C" {

// 1 when this build and this process may use AMX tiles; the other functions of this file do nothing otherwise.
int64_t sparring_has_tiles() { return permitted(); }

// weight [M, K] row-major -> panels; columns past M and k past K hold zeros.
void sparring_pack_bf16(const uint16_t *weight, uint16_t *panels, int64_t M, int64_t K, int threads) {
    int64_t depth = padded(K), num_panels = blocks_of(M, PANEL);
    parallel_for(num_panels, threads, [=](int64_t panel) {
        uint16_t *out = panels + panel * depth * PANEL;
        for (int64_t strip = 0; strip < depth; strip += DEPTH)
            for (int64_t m = 0; m < PANEL; m++) {
                int64_t row = panel * PANEL + m;
                for (int64_t k = strip; k < strip + DEPTH; k++)
                    out[k / 2 * PANEL * 2 + m * 2 + k % 2] = row < M && k < K ? weight[row * K + k] : 0;
            }
    });
}

// x [N, K] -> y [N, M], float32 when `wide`, else bfloat16.
void sparring_linear_bf16(const bf16 *x, const bf16 *panels, const float *bias, void *y, int wide, int64_t N, int64_t M,
                          int64_t K, int threads) {
    Weight w{panels, TILES_BF16, M, K, bias};
    if (wide) product(w, x, (float *)y, N, threads);
    else product(w, x, (bf16 *)y, N, threads);
}

#ifdef SPARRING_AMX
// weight [M, K] float32 -> panels of three planes.
void sparring_pack_split(const float *weight, bf16 *panels, int64_t M, int64_t K, int threads) {
    int64_t blocks = blocks_of(K, DEPTH);
    parallel_for(blocks_of(M, PANEL), threads, [=](int64_t panel) {
        alignas(64) bf16 rows[TILE * DEPTH * PLANES];
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t m = 0; m < PANEL; m += TILE) {
                bf16 *out = panels + (panel * blocks + block) * PLANES * PANEL_BLOCK + m * 2;
                memset(rows, 0, sizeof(rows));
                int64_t row = panel * PANEL + m, k = block * DEPTH;
                for (int64_t r = 0; r < smaller(TILE, M - row); r++)
                    for (int64_t half = 0; half < DEPTH && k + half < K; half += LANES) {
                        Halves parts = split(load_tail(weight + (row + r) * K + k + half, K - k - half));
                        for (int plane = 0; plane < PLANES; plane++)
                            _mm256_storeu_si256((__m256i *)(rows + (plane * TILE + r) * DEPTH + half), parts.part[plane]);
                    }
                for (int plane = 0; plane < PLANES; plane++) {
                    alignas(64) bf16 turned[TILE * DEPTH];
                    transpose_units(rows + plane * TILE_ELEMENTS, DEPTH, turned);
                    for (int64_t pair = 0; pair < TILE; pair++)
                        memcpy(out + plane * PANEL_BLOCK + pair * PANEL * 2, turned + pair * DEPTH, DEPTH * sizeof(bf16));
                }
            }
    });
}

// weight [M, K] float32 -> panels of its transpose [K, M], for the gradient of x.
void sparring_pack_split_transposed(const float *weight, bf16 *panels, int64_t M, int64_t K, int threads) {
    int64_t blocks = blocks_of(M, DEPTH);
    parallel_for(blocks_of(K, PANEL), threads, [=](int64_t panel) {
        for (int64_t block = 0; block < blocks; block++)
            pair_rows(weight, K, M, block, panel, panels + (panel * blocks + block) * PLANES * PANEL_BLOCK);
    });
}

// x [N, K] -> y [N, M], both float32.
void sparring_linear_split(const float *x, const bf16 *panels, const float *bias, float *y, int64_t N, int64_t M, int64_t K,
                           int threads) {
    product(Weight{panels, TILES_F32, M, K, bias}, x, y, N, threads);
}

// dw [M padded to 32][K padded to 32] <- dy [N, M]^T x [N, K]; N above 0. An element is a chain over ascending rows.
void sparring_weight_gradient_split(const float *x, const float *dy, float *dw, int64_t N, int64_t M, int64_t K, int threads) {
    weight_gradient(Gradient{x, dy, dw, M, K, nullptr, nullptr}, N, threads);
}
#else
void sparring_pack_split(const float *, bf16 *, int64_t, int64_t, int) {}
void sparring_pack_split_transposed(const float *, bf16 *, int64_t, int64_t, int) {}
void sparring_linear_split(const float *, const bf16 *, const float *, float *, int64_t, int64_t, int64_t, int) {}
void sparring_weight_gradient_split(const float *, const float *, float *, int64_t, int64_t, int64_t, int) {}
#endif

}  // extern "C"
}  // namespace sparring
