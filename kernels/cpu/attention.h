// Paged attention over 8-bit keys and values, for a tile of up to eight (token, query head) rows that share a key head.
//
// A block holds a piece for each layer and key head: keys as [D/4][block][4] bytes, so that sixteen positions are scored at
// once without sums across lanes, values as [block/4][D][4], then the scales: of the keys for each group of 32 dimensions,
// of the values for the whole head, [block] each. D is padded to a multiple of 32. Bytes are stored with 128 added.
//
// Queries and softmax weights are integers of 15 bits in two planes, so both products are exact; only scaling rounds. Softmax
// runs online over segments of 64 positions inside partitions of 512, and partitions are merged in order. All borders are
// at absolute positions: a row's arithmetic depends on nothing but its own context.
#pragma once
#include "gemm.h"

#define SEGMENT 64
#define PARTITION 512
#define MOST_HEAD_DIM 256
#define MOST_TILE 8
#define MOST_GROUPS (MOST_HEAD_DIM / GROUP)
#define ADDED 128

INLINE int padded(int head_dim) { return (head_dim + GROUP - 1) / GROUP * GROUP; }

INLINE size_t piece_bytes(int head_dim, int block) {
    return (size_t)block * (2 * padded(head_dim) + sizeof(float) * (padded(head_dim) / GROUP + 1));
}

typedef struct {
    const uint8_t *layer;          // of one layer in block 0
    const int32_t *table;          // the sequence's blocks
    size_t block_stride, piece;    // in bytes: a block's layers lie together
    int32_t block_size, block_shift, head, width;  // width: the padded head dimension
} kv_view;

typedef struct {
    const int8_t *high[MOST_TILE], *low[MOST_TILE];  // queries, [width] each
    const float *scale[MOST_TILE];                   // of their groups
    int32_t added[MOST_TILE][MOST_GROUPS];           // what the keys' 128 adds to a group's product
    int32_t from[MOST_TILE], to[MOST_TILE];          // positions that each row sees: from ≤ p < to
} tile_rows_view;

typedef struct {
    int8_t high[MOST_TILE][SEGMENT], low[MOST_TILE][SEGMENT];
    float scale[MOST_TILE];
    int32_t added[MOST_TILE];
} segment_weights;

typedef struct {
    float max[MOST_TILE], sum[MOST_TILE];
    float out[MOST_TILE][MOST_HEAD_DIM];
} softmax_part;

INLINE const uint8_t *piece_of(const kv_view *kv, int position) {
    size_t block = (size_t)kv->table[position >> kv->block_shift];
    return kv->layer + block * kv->block_stride + (size_t)kv->head * kv->piece;
}

// Where the sixteen positions from `position` on begin; a block holds a multiple of sixteen.
INLINE const uint8_t *keys_at(const kv_view *kv, int position) {
    return piece_of(kv, position) + (position & (kv->block_size - 1)) * 4;
}

INLINE const uint8_t *values_at(const kv_view *kv, int position) {
    return piece_of(kv, position) + (size_t)(kv->block_size + (position & (kv->block_size - 1))) * (size_t)kv->width;
}

// Group kv->width / GROUP is the values' scale.
INLINE const float *scales_at(const kv_view *kv, int position, int group) {
    const uint8_t *scales = piece_of(kv, position) + (size_t)2 * kv->block_size * kv->width;
    return (const float *)scales + group * kv->block_size + (position & (kv->block_size - 1));
}

// Four-byte dot products, added to 16 sums: unsigned bytes of 16 lanes with the same four signed ones.
INLINE i32v dot_four(i32v sum, const uint8_t *lanes, const int8_t *four) {
#if defined(__AVX512VNNI__)
    int32_t word;
    memcpy(&word, four, 4);
    return (i32v)_mm512_dpbusd_epi32((__m512i)sum, _mm512_loadu_si512(lanes), _mm512_set1_epi32(word));
#else
    for (int i = 0; i < LANES; i++)
        for (int b = 0; b < 4; b++) sum[i] += lanes[i * 4 + b] * four[b];
    return sum;
#endif
}

INLINE i32v whole(int32_t all) { return all - (i32v){}; }

// Blocks lie anywhere, and memory is slow: with each line goes a request for the same line further along the context,
// one by one, since many at once would hold up the work.
INLINE int further(int position, int reach) { return position + SEGMENT < reach ? position + SEGMENT : position; }

// Scores of `runs` times sixteen positions. Few rows take two runs side by side: sums of one would wait for each other.
INLINE void score_runs(const int rows, const int runs, const kv_view *kv, const tile_rows_view *t, int position, int end,
                       int reach, float scores[MOST_TILE][SEGMENT], int sub) {
    const uint8_t *at[2], *next[2];
    int place[2] = {position, position + LANES < end ? position + LANES : position};
    f32v score[2][MOST_TILE];
    for (int u = 0; u < runs; u++) {
        at[u] = keys_at(kv, place[u]);
        next[u] = keys_at(kv, further(place[u], reach));
        for (int g = 0; g <= kv->width / GROUP; g++) __builtin_prefetch(scales_at(kv, further(place[u], reach), g));
        for (int r = 0; r < rows; r++) score[u][r] = splat(0);
    }
    for (int g = 0; g < kv->width / GROUP; g++) {
        i32v high[2][MOST_TILE], low[2][MOST_TILE];
        for (int u = 0; u < runs; u++)
            for (int r = 0; r < rows; r++) high[u][r] = whole(0), low[u][r] = whole(-t->added[r][g]);
        for (int d = g * GROUP; d < (g + 1) * GROUP; d += 4)
            for (int u = 0; u < runs; u++) {
                const uint8_t *keys = at[u] + (size_t)d * kv->block_size;
                __builtin_prefetch(next[u] + (size_t)d * kv->block_size);
                for (int r = 0; r < rows; r++) {
                    high[u][r] = dot_four(high[u][r], keys, t->high[r] + d);
                    low[u][r] = dot_four(low[u][r], keys, t->low[r] + d);
                }
            }
        for (int u = 0; u < runs; u++) {
            f32v scale = load(scales_at(kv, place[u], g));
            for (int r = 0; r < rows; r++) {
                f32v product = __builtin_convertvector((high[u][r] << 7) + low[u][r], f32v);
                score[u][r] = fmadd(product * scale, splat(t->scale[r][g]), score[u][r]);
            }
        }
    }
    for (int r = 0; r < rows; r++) {
        float *to = scores[r] + sub;
        for (int u = 0; u < runs; u++) store(to + u * LANES, score[u][r]);
        if (position < t->from[r] || position + runs * LANES > t->to[r])
            for (int i = 0; i < runs * LANES; i++)
                if (position + i < t->from[r] || position + i >= t->to[r]) to[i] = -INFINITY;
    }
}

INLINE void score_segment(const int rows, const kv_view *kv, const tile_rows_view *t, int base, int end,
                          int reach, float scores[MOST_TILE][SEGMENT]) {
    const int runs = rows > MOST_TILE / 2 ? 1 : 2;
    for (int sub = 0; sub < SEGMENT; sub += runs * LANES) {
        if (base + sub < end)
            score_runs(rows, runs, kv, t, base + sub, end, reach, scores, sub);
        else
            for (int r = 0; r < rows; r++)
                for (int u = 0; u < runs; u++) store(scores[r] + sub + u * LANES, splat(-INFINITY));
    }
}

// Softmax weights times the values' scales, as integers. Where a weight is 0 the scale may be anything.
INLINE void quantize_weights(const float *p, const f32v scales[SEGMENT / LANES], segment_weights *w, int row) {
    f32v product[SEGMENT / LANES], most = splat(0);
    for (int i = 0; i < SEGMENT / LANES; i++) {
        f32v weight = load(p + i * LANES);
        product[i] = keep_lanes(weight > splat(0), weight * scales[i]);
        most = max_lanes(most, product[i]);
    }
    float top = max_of(most), inverse = top > 0 ? MOST_15 / top : 0.0f;
    i32v total = whole(0);
    for (int i = 0; i < SEGMENT / LANES; i++)
        total += to_planes(product[i] * inverse, w->high[row] + i * LANES, w->low[row] + i * LANES);
    w->scale[row] = top / MOST_15;
    w->added[row] = ADDED * sum_whole(total);
}

// Dimensions [d, d + 16·wide) of the values of `count` positions, weighted, onto part->out.
INLINE void add_columns(const int rows, const int wide, const uint8_t *const *at, const uint8_t *const *next, int width, int d,
                        int count,
                        const segment_weights *weights, softmax_part *part) {
    i32v high[2][MOST_TILE], low[2][MOST_TILE];
    for (int w = 0; w < wide; w++)
        for (int r = 0; r < rows; r++) high[w][r] = whole(0), low[w][r] = whole(-weights->added[r]);
    for (int i = 0; i < count; i += 4) {
        const uint8_t *from = at[i / LANES] + (size_t)(i % LANES) * width + d * 4;
        const uint8_t *ahead = next[i / LANES] + (size_t)(i % LANES) * width + d * 4;
        for (int w = 0; w < wide; w++) __builtin_prefetch(ahead + w * LANES * 4);
        for (int r = 0; r < rows; r++)
            for (int w = 0; w < wide; w++) {
                high[w][r] = dot_four(high[w][r], from + w * LANES * 4, weights->high[r] + i);
                low[w][r] = dot_four(low[w][r], from + w * LANES * 4, weights->low[r] + i);
            }
    }
    for (int w = 0; w < wide; w++)
        for (int r = 0; r < rows; r++) {
            float *out = part->out[r] + d + w * LANES;
            f32v sum = __builtin_convertvector((high[w][r] << 7) + low[w][r], f32v);
            store(out, fmadd(sum, splat(weights->scale[r]), load(out)));
        }
}

INLINE void add_values(const int rows, const kv_view *kv, int base, int end, int reach, const segment_weights *weights,
                       softmax_part *part) {
    const int wide = rows > MOST_TILE / 2 ? 1 : 2;
    int count = end - base < SEGMENT ? end - base : SEGMENT;
    const uint8_t *at[SEGMENT / LANES], *next[SEGMENT / LANES];
    for (int i = 0; i < count; i += LANES) {
        at[i / LANES] = values_at(kv, base + i);
        next[i / LANES] = values_at(kv, further(base + i, reach));
    }
    for (int d = 0; d < kv->width; d += wide * LANES) add_columns(rows, wide, at, next, kv->width, d, count, weights, part);
}

// Positions [start, start + 512) that any row sees, into `part`.
INLINE void attend_partition_rows(const int rows, const kv_view *kv, const tile_rows_view *t, int start,
                                  softmax_part *part) {
    int first = INT32_MAX, last = 0;
    for (int r = 0; r < rows; r++) {
        first = t->from[r] < first ? t->from[r] : first;
        last = t->to[r] > last ? t->to[r] : last;
        part->max[r] = -INFINITY;
        part->sum[r] = 0;
        memset(part->out[r], 0, sizeof(float) * (size_t)kv->width);
    }
    int end = last < start + PARTITION ? last : start + PARTITION;
    float scores[MOST_TILE][SEGMENT];
    segment_weights weights;
    for (int base = start; base < end; base += SEGMENT) {
        if (base + SEGMENT <= first) continue;
        score_segment(rows, kv, t, base, end, last, scores);
        f32v scales[SEGMENT / LANES];
        for (int i = 0; i < SEGMENT / LANES; i++)
            scales[i] = base + i * LANES < end ? load(scales_at(kv, base + i * LANES, kv->width / GROUP)) : splat(0);
        for (int r = 0; r < rows; r++) {
            f32v most = load(scores[r]);
            for (int i = LANES; i < SEGMENT; i += LANES) most = max_lanes(most, load(scores[r] + i));
            float top = max_of(most);
            if (top == -INFINITY) {
                memset(scores[r], 0, sizeof scores[r]);
                quantize_weights(scores[r], scales, &weights, r);
                continue;
            }
            if (top > part->max[r]) {
                float shrink = exp_one(part->max[r] - top);
                part->max[r] = top;
                part->sum[r] *= shrink;
                for (int d = 0; d < kv->width; d += LANES) store(part->out[r] + d, load(part->out[r] + d) * shrink);
            }
            f32v total = splat(0);
            for (int i = 0; i < SEGMENT; i += LANES) {
                f32v p = exp_lanes(load(scores[r] + i) - part->max[r]);
                store(scores[r] + i, p);
                total += p;
            }
            part->sum[r] += sum_lanes(total);
            quantize_weights(scores[r], scales, &weights, r);
        }
        add_values(rows, kv, base, end, last, &weights, part);
    }
}

static void attend_partition(int rows, const kv_view *kv, const tile_rows_view *t, int start, softmax_part *part) {
    switch (rows) {
        case 1: attend_partition_rows(1, kv, t, start, part); break;
        case 2: attend_partition_rows(2, kv, t, start, part); break;
        case 3: attend_partition_rows(3, kv, t, start, part); break;
        case 4: attend_partition_rows(4, kv, t, start, part); break;
        case 5: attend_partition_rows(5, kv, t, start, part); break;
        case 6: attend_partition_rows(6, kv, t, start, part); break;
        case 7: attend_partition_rows(7, kv, t, start, part); break;
        default: attend_partition_rows(8, kv, t, start, part); break;
    }
}

// Running merge of one row's partitions, in order.
INLINE void merge_part(float *max, float *sum, float *out, float part_max, float part_sum, const float *part_out,
                       int head_dim) {
    if (part_max == -INFINITY) return;
    float top = part_max > *max ? part_max : *max;
    float keep = *max == -INFINITY ? 0.0f : exp_one(*max - top), take = exp_one(part_max - top);
    *max = top;
    *sum = *sum * keep + part_sum * take;
    for (int d = 0; d < head_dim; d += LANES) store(out + d, fmadd(load(part_out + d), splat(take), load(out + d) * keep));
}
