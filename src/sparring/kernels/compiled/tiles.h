// Matrix products on AMX tiles: of bfloat16, and of float32 taken apart into three bfloat16.
//
// A float32 is the sum of three bfloat16 (hi = round(x), mid = round(x - hi), lo = x - hi - mid; exact for normal
// numbers), and a product of two is the sum of six products, (lo, hi) (hi, hi) (mid, hi) (mid, mid) (hi, mid) (hi, lo);
// what is left out is below 2^-26 of it (Henry, Tang, Heinecke 2019, "Leveraging the bfloat16 Artificial Intelligence
// Datatype For Higher-Precision Computations"). TDPBF16PS adds, for each element of a tile, 16 pairs of products to a
// float32 sum and never mixes rows. An element of a result is one such chain: k in blocks of 32 in ascending order, in
// each block the six products in the order above; then the bias. It is the same whatever rows are around it. Infinite
// numbers, and those that round to infinity in bfloat16 (above 3.39e38), give NaN; subnormal parts count as zero.
#pragma once

#include "memory.h"
#include "tile.h"

#if defined(SPARRING_SOFTWARE_TILES) && defined(__AVX512BF16__)
#include "tiles_software.h"
#define SPARRING_AMX 1
#elif defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#define SPARRING_AMX 1
#endif

namespace sparring {

constexpr int64_t PANEL = 64, DEPTH = 32, TILE = 16;  // columns of a panel; k of one tile; its rows
constexpr int64_t ROWS_PER_TASK = 192;
constexpr int64_t GROUP_BYTES =
    1000000;  // of a weight at a time: they stay in the second-level cache while rows pass by
constexpr int64_t PLANES = 3;
enum Plane { HI, MID, LO };

static inline int64_t padded(int64_t K) { return blocks_of(K, DEPTH) * DEPTH; }

// A weight of the tiles: panels [ceil(M / 64)][2][ceil(K / 32)][planes][16][32][2], halves of 32 columns, pairs of k
// next to each other, zeros past M and K; one plane for bfloat16, three for float32.
struct TileWeight {
    const bf16 *panels;
    const float *bias;
    int64_t M, blocks;  // blocks of 32 k
};

constexpr int64_t TILE_ELEMENTS = TILE * DEPTH;
constexpr int64_t HALF_BLOCK = 2 * TILE_ELEMENTS,
                  PANEL_BLOCK = 2 * HALF_BLOCK;  // elements of one plane of one block of a panel

// Where a column of a panel begins, `planes` counted over all its blocks.
static inline int64_t place_in_panel(int64_t column, int64_t planes) {
    return column / (2 * TILE) * planes * HALF_BLOCK + column % (2 * TILE) * 2;
}

#ifdef SPARRING_AMX
constexpr int ASK_PERMISSION = 0x1023, TILE_DATA = 18;  // arch_prctl: ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA

#ifdef SPARRING_SOFTWARE_TILES
static inline bool permitted() { return true; }
#else
static inline bool permitted() {
    static const bool yes = syscall(SYS_arch_prctl, ASK_PERMISSION, TILE_DATA) == 0;
    return yes;
}
#endif

// GCC does not know that the instructions which load tiles read memory: what is written before this is there for them.
static inline void settle_memory() { asm volatile("" ::: "memory"); }

// Tiles 0-3: sums of 2 x 2; 4, 5: rows of x; 6, 7: columns. `above` and `below` are the rows of either half.
static inline void shape_tiles(int64_t above, int64_t below) {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    const int64_t rows[8] = {above, above, below, below, above, below, TILE, TILE};
    for (int i = 0; i < 8; i++) {
        shape.rows[i] = (uint8_t)rows[i];
        shape.row_bytes[i] = rows[i] ? 64 : 0;
    }
    settle_memory();
    _tile_loadconfig(&shape);
}

struct Halves {
    __m256i part[PLANES];
};

static inline __m256i to_bf16(__m512 x) { return (__m256i)_mm512_cvtneps_pbh(x); }
static inline __m512 from_bf16(__m256i x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

static inline Halves split(__m512 x) {
    Halves out;
    out.part[HI] = to_bf16(x);
    x = x - from_bf16(out.part[HI]);
    out.part[MID] = to_bf16(x);
    out.part[LO] = to_bf16(x - from_bf16(out.part[MID]));
    return out;
}

// The sums of a 2 x 2 block of tiles grow by one block of k of one plane of rows times one of columns.
template <bool TWO> static inline __attribute__((always_inline)) void load_rows(const bf16 *a, int64_t half) {
    _tile_loadd(4, a, 2 * DEPTH);
    if (TWO) _tile_loadd(5, a + half, 2 * DEPTH);
}
static inline __attribute__((always_inline)) void load_columns(const bf16 *b) {
    _tile_loadd(6, b, 4 * DEPTH);
    _tile_loadd(7, b + DEPTH, 4 * DEPTH);
}
template <bool TWO> static inline __attribute__((always_inline)) void multiply() {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    if (TWO) {
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
}

// Where the operands of a 2 x 2 block of tiles lie: rows as tiles [blocks][planes][16][32], the lower ones `a_half`
// elements further; columns as half a panel.
struct Operands {
    const bf16 *a, *b;
    int64_t a_half;
};

template <bool TWO> static inline __attribute__((always_inline)) void load_first(const Operands &o) {
    settle_memory();
    load_columns(o.b + HI * HALF_BLOCK);
    load_rows<TWO>(o.a + LO * TILE_ELEMENTS, o.a_half);
}

// The first operands are in their tiles when it begins, and those of the `next` product when it ends: loaded before the
// sums are stored, they do not wait for stores to addresses that differ from theirs by a multiple of 4096. Tile
// products use one unit of a core and leave the others idle, so the work of `meanwhile` is nearly free.
template <bool TWO, class Meanwhile>
static inline void multiply_split(Operands o, int64_t blocks, const Operands &next, Meanwhile &meanwhile) {
    for (int64_t i = 0; i < blocks; i++) {
        multiply<TWO>();
        meanwhile();
        load_rows<TWO>(o.a + HI * TILE_ELEMENTS, o.a_half);
        multiply<TWO>();
        meanwhile();
        load_rows<TWO>(o.a + MID * TILE_ELEMENTS, o.a_half);
        multiply<TWO>();
        meanwhile();
        load_columns(o.b + MID * HALF_BLOCK);
        multiply<TWO>();
        meanwhile();
        load_rows<TWO>(o.a + HI * TILE_ELEMENTS, o.a_half);
        multiply<TWO>();
        meanwhile();
        load_columns(o.b + LO * HALF_BLOCK);
        multiply<TWO>();
        meanwhile();
        o.a += PLANES * TILE_ELEMENTS, o.b += PLANES * HALF_BLOCK;
        load_first<TWO>(i + 1 < blocks ? o : next);
    }
}

template <bool TWO, class Meanwhile>
static inline void multiply_plain(const Operands &o, int64_t blocks, Meanwhile &meanwhile) {
    const bf16 *a = o.a, *b = o.b;
    settle_memory();
    for (int64_t i = 0; i < blocks; i++, a += TILE_ELEMENTS, b += HALF_BLOCK) {
        load_rows<TWO>(a, o.a_half);
        load_columns(b);
        multiply<TWO>();
        meanwhile();
    }
}

template <bool TWO> static inline void clear_sums() {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

static inline void load_sums(const float *sums, int64_t stride) {
    _tile_loadd(0, sums, stride * 4);
    _tile_loadd(1, sums + TILE, stride * 4);
    _tile_loadd(2, sums + TILE * stride, stride * 4);
    _tile_loadd(3, sums + TILE * stride + TILE, stride * 4);
}

static inline void store_sums(float *sums, int64_t stride, bool two) {
    _tile_stored(0, sums, stride * 4);
    _tile_stored(1, sums + TILE, stride * 4);
    if (two) {
        _tile_stored(2, sums + TILE * stride, stride * 4);
        _tile_stored(3, sums + TILE * stride + TILE, stride * 4);
    }
}

// 32 elements of a row, zeros past `left`, into a row of a tile; its planes are a tile apart.
static inline __attribute__((always_inline)) void lay_block(const float *x, int64_t left, bf16 *out) {
    for (int64_t half = 0; half < DEPTH; half += LANES) {
        Halves parts = split(half < left ? load_tail(x + half, left - half) : splat(0.0f));
        for (int plane = 0; plane < PLANES; plane++)
            _mm256_storeu_si256((__m256i *)(out + plane * TILE_ELEMENTS + half), parts.part[plane]);
    }
}

static inline __attribute__((always_inline)) void lay_block(const bf16 *x, int64_t left, bf16 *out) {
    __mmask32 in = left < DEPTH ? (1u << left) - 1 : ~0u;
    _mm512_storeu_si512(out, _mm512_maskz_loadu_epi16(in, x));
}

// Work between the products of a strip of 32 rows: the next strip is laid out as tiles, [2][blocks][planes][16][32],
// and the cache lines of the sums are prefetched for their stores.
template <class X, class Y> struct BetweenStrips {
    const X *x;
    int64_t K, rows;  // of the next strip
    bf16 *tiles;
    Y *line = nullptr;
    int64_t y_stride = 0, lines = 0, row = 0, block = 0;

    inline __attribute__((always_inline)) void lay() {
        constexpr int64_t planes = sizeof(X) == sizeof(float) ? PLANES : 1;
        int64_t blocks = blocks_of(K, DEPTH);
        bf16 *out = tiles + (row / TILE * blocks + block) * planes * TILE_ELEMENTS + row % TILE * DEPTH;
        lay_block(x + row * K + block * DEPTH, K - block * DEPTH, out);
        if (++block == blocks) block = 0, row++;
    }

    void lay_all() {
        while (row < rows) lay();
    }

    inline __attribute__((always_inline)) void operator()() {
        for (int i = 0; i < 2 && lines > 0; i++, lines--, line += y_stride) {
            __builtin_prefetch(line, 1);
            __builtin_prefetch(line + 2 * TILE - 1, 1);
        }
        if (row < rows) lay();
    }
};

// Stores a sum: adds the bias, rounds to the type of y, drops the columns past M.
template <class Y>
static inline void finish_sums(const TileWeight &w, const float *sums, Y *y, int64_t y_stride, int64_t rows,
                               int64_t column) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t i = 0; i < 2 * TILE && column + i < w.M; i += LANES) {
            v16 sum = load(sums + r * 2 * TILE + i);
            int64_t left = w.M - column - i;
            if (w.bias) sum = sum + load_tail(w.bias + column + i, left);
            store_tail(y + r * y_stride + column + i, left, sum);
        }
}

// A strip of rows, laid as tiles, times columns [begin, end).
template <bool TWO, class X, class Y>
static void multiply_strip(const TileWeight &w, const bf16 *tiles, Y *y, int64_t rows, int64_t begin, int64_t end,
                           BetweenStrips<X, Y> &between) {
    constexpr int64_t planes = sizeof(X) == sizeof(float) ? PLANES : 1;
    alignas(64) float sums[2 * TILE * 2 * TILE];
    auto operands = [&](int64_t column) {
        const bf16 *b = w.panels + column / (2 * TILE) * w.blocks * planes * HALF_BLOCK;
        return Operands{tiles, b, w.blocks * planes * TILE_ELEMENTS};
    };
    if (planes > 1) load_first<TWO>(operands(begin));
    for (int64_t column = begin; column < end; column += 2 * TILE) {
        Operands o = operands(column), next = operands(column + 2 * TILE < end ? column + 2 * TILE : begin);
        between.line = y + column, between.lines = rows;
        clear_sums<TWO>();
        if constexpr (planes > 1) multiply_split<TWO>(o, w.blocks, next, between);
        else multiply_plain<TWO>(o, w.blocks, between);
        if constexpr (sizeof(Y) == sizeof(float))
            if (!w.bias && column + 2 * TILE <= w.M) {
                store_sums(y + column, between.y_stride, TWO);
                continue;
            }
        store_sums(sums, 2 * TILE, TWO);
        finish_sums(w, sums, y, between.y_stride, rows, column);
    }
}

// y [rows][M], rows y_stride apart <- x [rows][K] W^T + bias. X float means a weight of three planes.
template <class X, class Y>
static void tile_rows(const TileWeight &w, const X *x, Y *y, int64_t K, int64_t y_stride, int64_t rows) {
    constexpr int64_t planes = sizeof(X) == sizeof(float) ? PLANES : 1, strip = 2 * TILE;
    static thread_local Buffer<bf16> scratch;
    int64_t tile_step = w.blocks * planes * TILE_ELEMENTS;
    int64_t group_columns = larger(1, GROUP_BYTES / (w.blocks * planes * HALF_BLOCK * 2)) * strip;
    // With all columns in one group a strip is read only once: strips take turns in the room of two.
    int64_t at_once = group_columns < w.M ? ROWS_PER_TASK : rows,
            kept = group_columns < w.M ? ROWS_PER_TASK : 2 * strip;
    bf16 *tiles = scratch.room(kept / TILE * tile_step);
    for (int64_t first = 0; first < rows; first += at_once) {
        int64_t count = smaller(at_once, rows - first), shaped = 0;
        BetweenStrips<X, Y>{x + first * K, K, smaller(strip, count), tiles}.lay_all();
        for (int64_t group = 0; group < w.M; group += group_columns)
            for (int64_t row = 0; row < count; row += strip) {
                int64_t here = smaller(strip, count - row), next = row + strip,
                        end = smaller(w.M, group + group_columns);
                if (here != shaped) shape_tiles(smaller(here, TILE), larger(here - TILE, 0));
                shaped = here;
                BetweenStrips<X, Y> between{x + (first + next) * K, K, group ? 0 : smaller(strip, count - next),
                                            tiles + next % kept / TILE * tile_step};
                between.y_stride = y_stride;
                const bf16 *laid = tiles + row % kept / TILE * tile_step;
                Y *out = y + (first + row) * y_stride;
                if (here > TILE) multiply_strip<true>(w, laid, out, here, group, end, between);
                else multiply_strip<false>(w, laid, out, here, group, end, between);
                between.lay_all();
            }
        _tile_release();
    }
}
#else
static inline bool permitted() { return false; }
template <class X, class Y> static void tile_rows(const TileWeight &, const X *, Y *, int64_t, int64_t, int64_t) {}
#endif

}  // namespace sparring
