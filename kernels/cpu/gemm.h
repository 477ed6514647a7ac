// Matrices in groups of 32 inputs, w = scale · value + offset with 4- or 8-bit values, times rows quantized in the same
// groups to 8 bits or 15. The products are exact integers; only the sums over groups are floating point,
// in group order.
//
// Packed by tiles of 16 outputs. A group of a tile holds eight runs of [16 outputs][4 inputs] bytes; with 4 bits, run j
// and run j + 4 share bytes, low nibble first. Scales: [tile][group][2][16], the scales, then the offsets.
#pragma once
#include "vec.h"

#define MOST_ROWS 4

typedef struct {
    const uint8_t *values;
    const void *scales;
    const float *bias;
    int32_t outputs, inputs, bits, half_scales;
} matrix;

// Rows of activations: x = scale · value for each group, with value = 128 · high + low; sum = scale · Σ value.
//
// Most of what 8 bits lose is lost in the few groups of a row that hold its largest numbers. Only those, the loud ones, have
// a low plane; in the others it is 0 and left out.
typedef struct {
    int8_t *high, *low;
    uint8_t *loud;  // [groups][most_rows], so that a few rows' flags of a group are read at once
    float *scale, *sum;
    int32_t inputs, most_rows;
    float loudness;  // a group is loud if its largest square exceeds this times the row's mean of such
} quantized;

#define MOST_8 127
#define MOST_15 (127 * 128 + 63)

// Sixteen values of 15 bits as 128 · high + low.
INLINE i32v to_planes(f32v x, int8_t *highs, int8_t *lows) {
    i32v value = nearest(x), high = (value + 64) >> 7;
    store_bytes(highs, high);
    store_bytes(lows, value - (high << 7));
    return value;
}

INLINE float largest_of(const float *x) {
    f32v first = load(x), second = load(x + LANES);
    return max_of(max_lanes(max_lanes(first, -first), max_lanes(second, -second)));
}

INLINE void quantize_group(const float *x, float most, int loud, quantized *q, int row, int group) {
    size_t at = (size_t)row * q->inputs + (size_t)group * GROUP, place = (size_t)row * (q->inputs / GROUP) + group;
    f32v first = load(x), second = load(x + LANES);
    int8_t *high = q->high + at, *low = q->low + at;
    i32v total;
    if (loud) {
        float inverse = most > 0 ? MOST_15 / most : 0.0f;
        total = to_planes(first * inverse, high, low) + to_planes(second * inverse, high + LANES, low + LANES);
        q->scale[place] = most / MOST_15;
    } else {
        float inverse = most > 0 ? MOST_8 / most : 0.0f;
        i32v a = nearest(first * inverse), b = nearest(second * inverse);
        store_bytes(high, a);
        store_bytes(high + LANES, b);
        memset(low, 0, GROUP);
        total = (a + b) << 7;
        q->scale[place] = most / (MOST_8 * 128);
    }
    q->loud[(size_t)group * q->most_rows + row] = (uint8_t)loud;
    q->sum[place] = q->scale[place] * (float)sum_whole(total);
}

INLINE void quantize_row(const float *x, quantized *q, int row) {
    int groups = q->inputs / GROUP;
    float *largest = q->scale + (size_t)row * groups, squares = 0;
    for (int g = 0; g < groups; g++) {
        largest[g] = largest_of(x + g * GROUP);
        squares += largest[g] * largest[g];
    }
    float bound = q->loudness * squares / (float)groups;
    for (int g = 0; g < groups; g++) {
        float most = largest[g];
        quantize_group(x + g * GROUP, most, most * most > bound, q, row, g);
    }
}

INLINE void group_scales(const matrix *m, size_t group, f32v *scale, f32v *offset) {
    if (m->half_scales) {
        const half *at = (const half *)m->scales + group * 2 * LANES;
        *scale = load_half(at);
        *offset = load_half(at + LANES);
    } else {
        const float *at = (const float *)m->scales + group * 2 * LANES;
        *scale = load(at);
        *offset = load(at + LANES);
    }
}

// y[t][r]: 16 outputs of tile + t for row + r. Two tiles share each input that is loaded; tiles and rows are constants where
// this is inlined, so that everything stays in registers.
#if defined(__AVX512VNNI__)

INLINE int any_loud(const quantized *x, int row, int rows, int group) {
    int any = 0;
    for (int r = 0; r < rows; r++) any |= x->loud[(size_t)group * x->most_rows + row + r];
    return any;
}

INLINE __m512i four_of(const int8_t *at) {
    int32_t four;
    memcpy(&four, at, 4);
    return _mm512_set1_epi32(four);
}

// Four inputs at a time of a group's `plane`, onto the sums of every tile and row.
INLINE void add_plane(const int tiles, const int rows, const int bits, const uint8_t *w, size_t next,
                      const int8_t *const *plane, __m512i sum[2][MOST_ROWS]) {
    const __m512i low_nibbles = _mm512_set1_epi8(15);
#pragma GCC unroll 8
    for (int j = 0; j < bits; j++) {
        __m512i low[2], high[2];
        for (int t = 0; t < tiles; t++) {
            low[t] = _mm512_loadu_si512(w + t * next + j * 64);
            if (bits == 4) {
                high[t] = _mm512_and_si512(_mm512_srli_epi16(low[t], 4), low_nibbles);
                low[t] = _mm512_and_si512(low[t], low_nibbles);
            }
        }
        for (int r = 0; r < rows; r++) {
            __m512i first = four_of(plane[r] + j * 4);
            for (int t = 0; t < tiles; t++) sum[t][r] = _mm512_dpbusd_epi32(sum[t][r], low[t], first);
            if (bits == 4) {
                __m512i second = four_of(plane[r] + j * 4 + 16);
                for (int t = 0; t < tiles; t++) sum[t][r] = _mm512_dpbusd_epi32(sum[t][r], high[t], second);
            }
        }
    }
}

INLINE void tile_rows(const int tiles, const int rows, const int bits, const matrix *m, int tile, const quantized *x, int row,
                      f32v y[2][MOST_ROWS]) {
    const int groups = m->inputs / GROUP, bytes = bits == 4 ? 256 : 512;
    const uint8_t *w = m->values + (size_t)tile * groups * bytes;
    const size_t next = (size_t)groups * bytes;
    for (int r = 0; r < rows; r++)
        for (int t = 0; t < tiles; t++) y[t][r] = splat(0);
    for (int g = 0; g < groups; g++, w += bytes) {
        __m512i sum[2][MOST_ROWS];
        const int8_t *plane[MOST_ROWS];
        for (int t = 0; t < tiles; t++) {
            _mm_prefetch((const char *)(w + t * next) + 4 * bytes, _MM_HINT_T0);
            for (int r = 0; r < rows; r++) sum[t][r] = _mm512_setzero_si512();
        }
        for (int r = 0; r < rows; r++) plane[r] = x->high + (size_t)(row + r) * x->inputs + g * GROUP;
        add_plane(tiles, rows, bits, w, next, plane, sum);
        for (int t = 0; t < tiles; t++)
            for (int r = 0; r < rows; r++) sum[t][r] = _mm512_slli_epi32(sum[t][r], 7);
        if (any_loud(x, row, rows, g)) {
            for (int r = 0; r < rows; r++) plane[r] = x->low + (size_t)(row + r) * x->inputs + g * GROUP;
            add_plane(tiles, rows, bits, w, next, plane, sum);
        }
        for (int t = 0; t < tiles; t++) {
            f32v scale, offset;
            group_scales(m, (size_t)(tile + t) * groups + g, &scale, &offset);
            for (int r = 0; r < rows; r++) {
                size_t at = (size_t)(row + r) * groups + g;
                y[t][r] = fmadd((f32v)_mm512_cvtepi32_ps(sum[t][r]), scale * x->scale[at], y[t][r]);
                y[t][r] = fmadd(offset, splat(x->sum[at]), y[t][r]);
            }
        }
    }
}

#else

INLINE void tile_rows(const int tiles, const int rows, const int bits, const matrix *m, int tile, const quantized *x, int row,
                      f32v y[2][MOST_ROWS]) {
    const int groups = m->inputs / GROUP, bytes = bits == 4 ? 256 : 512;
    for (int t = 0; t < tiles; t++)
        for (int r = 0; r < rows; r++) y[t][r] = splat(0);
    for (int t = 0; t < tiles; t++)
        for (int g = 0; g < groups; g++) {
            const uint8_t *w = m->values + ((size_t)(tile + t) * groups + g) * bytes;
            uint8_t wide[512];
            if (bits == 4) {
                for (int i = 0; i < 256; i++) {
                    wide[i] = w[i] & 15;
                    wide[256 + i] = w[i] >> 4;
                }
            } else {
                memcpy(wide, w, 512);
            }
            f32v scale, offset;
            group_scales(m, (size_t)(tile + t) * groups + g, &scale, &offset);
            for (int r = 0; r < rows; r++) {
                size_t in = (size_t)(row + r) * x->inputs + (size_t)g * GROUP;
                int16_t value[GROUP];
                for (int i = 0; i < GROUP; i++)
                    value[i] = (int16_t)(x->high[in + i] * 128 + x->low[in + i]);
                int32_t sum[LANES] = {0};
                for (int j = 0; j < 8; j++)
                    for (int lane = 0; lane < LANES; lane++)
                        for (int b = 0; b < 4; b++) sum[lane] += wide[j * 64 + lane * 4 + b] * value[j * 4 + b];
                f32v exact;
                for (int lane = 0; lane < LANES; lane++) exact[lane] = (float)sum[lane];
                size_t at = (size_t)(row + r) * groups + g;
                y[t][r] = fmadd(exact, scale * x->scale[at], y[t][r]);
                y[t][r] = fmadd(offset, splat(x->sum[at]), y[t][r]);
            }
        }
}

#endif

// out[row][16·tile …] = (or, with `add`, +=) x · Wᵀ + bias.
INLINE void tile_block(const int tiles, const int rows, const matrix *m, int tile, const quantized *x, int row, float *out,
                       int stride, int add) {
    f32v y[2][MOST_ROWS];
    m->bits == 4 ? tile_rows(tiles, rows, 4, m, tile, x, row, y) : tile_rows(tiles, rows, 8, m, tile, x, row, y);
    for (int t = 0; t < tiles; t++) {
        int first = (tile + t) * LANES, width = m->outputs - first;
        for (int r = 0; r < rows; r++) {
            float *to = out + (size_t)(row + r) * stride + first;
            if (width >= LANES) {
                if (m->bias) y[t][r] += load(m->bias + first);
                store(to, add ? load(to) + y[t][r] : y[t][r]);
            } else {
                for (int i = 0; i < width; i++) {
                    float value = y[t][r][i] + (m->bias ? m->bias[first + i] : 0.0f);
                    to[i] = add ? to[i] + value : value;
                }
            }
        }
    }
}

// A share of the memory from `from` on, asked for before it is needed.
INLINE void fetch_share(const void *from, size_t bytes, int share, int shares) {
    const char *at = (const char *)from + bytes * (size_t)share / (size_t)shares;
    for (const char *end = (const char *)from + bytes * (size_t)(share + 1) / (size_t)shares; at < end; at += 64) __builtin_prefetch(at);
}

// Rows [first, last) of one tile, or of two beside each other. Between blocks of rows, what tile `then` and the one after it
// will need is asked for: their first rows would else wait for memory.
INLINE void multiply_tiles(const int tiles, const matrix *m, int tile, int then, const quantized *x, int first, int last,
                           float *out, int stride, int add) {
    int row = first, blocks = (last - first) / 4, ends = (m->outputs + LANES - 1) / LANES;
    size_t values = (size_t)(m->inputs / GROUP) * (m->bits == 4 ? 256 : 512);
    size_t scales = (size_t)(m->inputs / GROUP) * 2 * LANES * (m->half_scales ? sizeof(half) : sizeof(float));
    int next = then + 2 <= ends ? 2 : then < ends ? 1 : 0;
    for (int block = 0; block < blocks; block++, row += 4) {
        if (next) {
            fetch_share(m->values + (size_t)then * values, (size_t)next * values, block, blocks);
            fetch_share((const char *)m->scales + (size_t)then * scales, (size_t)next * scales, block, blocks);
        }
        tile_block(tiles, 4, m, tile, x, row, out, stride, add);
    }
    switch (last - row) {
        case 3: tile_block(tiles, 3, m, tile, x, row, out, stride, add); break;
        case 2: tile_block(tiles, 2, m, tile, x, row, out, stride, add); break;
        case 1: tile_block(tiles, 1, m, tile, x, row, out, stride, add); break;
        default: break;
    }
}

// `then`: the tile at which this thread is likely to go on after these.
static void multiply(const matrix *m, int first_tile, int last_tile, int then, const quantized *x, int first, int last,
                     float *out, int stride, int add) {
    int tile = first_tile;
    for (; tile + 2 <= last_tile; tile += 2)
        multiply_tiles(2, m, tile, tile + 2 < last_tile ? tile + 2 : then, x, first, last, out, stride, add);
    if (tile < last_tile) multiply_tiles(1, m, tile, then, x, first, last, out, stride, add);
}

INLINE int tiles_of(const matrix *m) { return (m->outputs + LANES - 1) / LANES; }

// Row `output` of W in float, as an embedding.
static void unpack_row(const matrix *m, int output, float *to) {
    const int groups = m->inputs / GROUP, bytes = m->bits == 4 ? 256 : 512, tile = output / LANES, lane = output % LANES;
    for (int g = 0; g < groups; g++) {
        const uint8_t *w = m->values + ((size_t)tile * groups + g) * bytes;
        f32v scale, offset;
        group_scales(m, (size_t)tile * groups + g, &scale, &offset);
        for (int i = 0; i < GROUP; i++) {
            int run = i / 4, at = lane * 4 + i % 4;
            int value = m->bits == 8 ? w[run * 64 + at] : run < 4 ? w[run * 64 + at] & 15 : w[(run - 4) * 64 + at] >> 4;
            to[g * GROUP + i] = __builtin_fmaf(scale[lane], (float)value, offset[lane]);
        }
    }
}
