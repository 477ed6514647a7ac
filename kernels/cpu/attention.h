// Paged attention over 16-bit keys and values, for a tile of up to eight (token, query head) rows that share a key head.
//
// Keys of a block lie transposed, [D][block], so that sixteen positions are scored at once without sums across lanes;
// values lie [block][D]. Softmax runs online over segments of 64 positions inside partitions of 512, and partitions are
// merged in order. All borders are at absolute positions: a row's arithmetic depends on nothing but its own context.
#pragma once
#include "vec.h"

#define SEGMENT 64
#define PARTITION 512
#define MOST_HEAD_DIM 256
#define MOST_TILE 8

typedef struct {
    const half *keys, *values;  // of one layer in block 0: [Hk][D][block], [Hk][block][D]
    const int32_t *table;       // the sequence's blocks
    size_t block_stride;        // in halves: a block's layers lie together
    int32_t block_size, block_shift, head, head_dim;
} kv_view;

typedef struct {
    const float *q[MOST_TILE];  // scaled queries, [D] each
    int32_t from[MOST_TILE], to[MOST_TILE];  // positions that each row sees: from ≤ p < to
} tile_rows_view;

typedef struct {
    float max[MOST_TILE], sum[MOST_TILE];
    float out[MOST_TILE][MOST_HEAD_DIM];
} softmax_part;

// Where the sixteen positions from `position` on begin; a block holds a multiple of sixteen.
INLINE const half *keys_at(const kv_view *kv, int position) {
    size_t block = (size_t)kv->table[position >> kv->block_shift];
    return kv->keys + block * kv->block_stride + (((size_t)kv->head * kv->head_dim) << kv->block_shift) +
           (position & (kv->block_size - 1));
}

INLINE const half *values_at(const kv_view *kv, int position) {
    size_t block = (size_t)kv->table[position >> kv->block_shift];
    return kv->values + block * kv->block_stride +
           (((size_t)kv->head << kv->block_shift) + (position & (kv->block_size - 1))) * (size_t)kv->head_dim;
}

INLINE void fetch_ahead(const half *from, int halves) {
    for (int i = 0; i < halves; i += 32) __builtin_prefetch(from + i);
}

// Two runs of sixteen positions are scored side by side: with few rows, one run's sums would wait for each other.
INLINE void score_segment(const int rows, const kv_view *kv, const tile_rows_view *t, int base, int end, int reach,
                          float scores[MOST_TILE][SEGMENT]) {
    for (int sub = 0; sub < SEGMENT; sub += 2 * LANES) {
        int position = base + sub;
        if (position >= end) {
            for (int r = 0; r < rows; r++)
                store(scores[r] + sub, splat(-INFINITY)), store(scores[r] + sub + LANES, splat(-INFINITY));
            continue;
        }
        int other = position + LANES < end ? position + LANES : position;
        const half *first = keys_at(kv, position), *second = keys_at(kv, other);
        // blocks lie anywhere, and memory is slow: these values and the keys a segment further are asked for now
        fetch_ahead(values_at(kv, position), LANES * kv->head_dim);
        fetch_ahead(values_at(kv, other), LANES * kv->head_dim);
        if (kv->block_size == LANES && other + SEGMENT < reach) {
            fetch_ahead(keys_at(kv, position + SEGMENT), LANES * kv->head_dim);
            fetch_ahead(keys_at(kv, other + SEGMENT), LANES * kv->head_dim);
        }
        f32v dot[2][MOST_TILE];
        for (int r = 0; r < rows; r++) dot[0][r] = dot[1][r] = splat(0);
        for (int d = 0; d < kv->head_dim; d++) {
            f32v a = load_half(first + (size_t)d * kv->block_size), b = load_half(second + (size_t)d * kv->block_size);
            for (int r = 0; r < rows; r++) {
                f32v q = splat(t->q[r][d]);
                dot[0][r] = fmadd(a, q, dot[0][r]);
                dot[1][r] = fmadd(b, q, dot[1][r]);
            }
        }
        for (int r = 0; r < rows; r++) {
            float *to = scores[r] + sub;
            store(to, dot[0][r]);
            store(to + LANES, dot[1][r]);
            if (position < t->from[r] || position + 2 * LANES > t->to[r])
                for (int i = 0; i < 2 * LANES; i++)
                    if (position + i < t->from[r] || position + i >= t->to[r]) to[i] = -INFINITY;
        }
    }
}

// Columns [d, d + 16·wide) of the values of `count` positions, weighted by p, onto part->out.
INLINE void add_columns(const int rows, const int wide, const half *const *at, int stride, int d, int count,
                        float p[MOST_TILE][SEGMENT], softmax_part *part) {
    f32v sum[2][MOST_TILE];
    for (int w = 0; w < wide; w++)
        for (int r = 0; r < rows; r++) sum[w][r] = load(part->out[r] + d + w * LANES);
    for (int i = 0; i < count; i++) {
        const half *from = at[i / LANES] + (i % LANES) * stride + d;
        f32v v[2];
        for (int w = 0; w < wide; w++) v[w] = load_half(from + w * LANES);
        for (int r = 0; r < rows; r++)
            for (int w = 0; w < wide; w++) sum[w][r] = fmadd(v[w], splat(p[r][i]), sum[w][r]);
    }
    for (int w = 0; w < wide; w++)
        for (int r = 0; r < rows; r++) store(part->out[r] + d + w * LANES, sum[w][r]);
}

INLINE void add_values(const int rows, const kv_view *kv, int base, int end, float p[MOST_TILE][SEGMENT],
                       softmax_part *part) {
    int count = end - base < SEGMENT ? end - base : SEGMENT, d = 0;
    const half *at[SEGMENT / LANES];
    for (int i = 0; i < count; i += LANES) at[i / LANES] = values_at(kv, base + i);
    for (; d + 2 * LANES <= kv->head_dim; d += 2 * LANES) add_columns(rows, 2, at, kv->head_dim, d, count, p, part);
    if (d < kv->head_dim) add_columns(rows, 1, at, kv->head_dim, d, count, p, part);
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
        memset(part->out[r], 0, sizeof(float) * (size_t)kv->head_dim);
    }
    int end = last < start + PARTITION ? last : start + PARTITION;
    float scores[MOST_TILE][SEGMENT];
    for (int base = start; base < end; base += SEGMENT) {
        if (base + SEGMENT <= first) continue;
        score_segment(rows, kv, t, base, end, last, scores);
        for (int r = 0; r < rows; r++) {
            f32v most = load(scores[r]);
            for (int i = LANES; i < SEGMENT; i += LANES) most = max_lanes(most, load(scores[r] + i));
            float top = max_of(most);
            if (top == -INFINITY) {
                memset(scores[r], 0, sizeof scores[r]);
                continue;
            }
            if (top > part->max[r]) {
                float shrink = exp_one(part->max[r] - top);
                part->max[r] = top;
                part->sum[r] *= shrink;
                for (int d = 0; d < kv->head_dim; d += LANES) store(part->out[r] + d, load(part->out[r] + d) * shrink);
            }
            f32v total = splat(0);
            for (int i = 0; i < SEGMENT; i += LANES) {
                f32v p = exp_lanes(load(scores[r] + i) - part->max[r]);
                store(scores[r] + i, p);
                total += p;
            }
            part->sum[r] += sum_lanes(total);
        }
        add_values(rows, kv, base, end, scores, part);
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
