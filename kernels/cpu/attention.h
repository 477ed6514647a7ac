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

INLINE void score_segment(const int rows, const kv_view *kv, const tile_rows_view *t, int base, int end,
                          float scores[MOST_TILE][SEGMENT]) {
    for (int sub = 0; sub < SEGMENT; sub += LANES) {
        int position = base + sub;
        if (position >= end) {
            for (int r = 0; r < rows; r++) store(scores[r] + sub, splat(-INFINITY));
            continue;
        }
        const half *keys = keys_at(kv, position);
        // blocks lie anywhere: the next keys and these values are asked for while these keys are used
        fetch_ahead(values_at(kv, position), LANES * kv->head_dim);
        if (kv->block_size == LANES && position + LANES < end)
            fetch_ahead(keys_at(kv, position + LANES), LANES * kv->head_dim);
        f32v dot[MOST_TILE];
        for (int r = 0; r < rows; r++) dot[r] = splat(0);
        for (int d = 0; d < kv->head_dim; d++) {
            f32v k = load_half(keys + (size_t)d * kv->block_size);
            for (int r = 0; r < rows; r++) dot[r] = fmadd(k, splat(t->q[r][d]), dot[r]);
        }
        for (int r = 0; r < rows; r++) {
            float *to = scores[r] + sub;
            store(to, dot[r]);
            if (position < t->from[r] || position + LANES > t->to[r])
                for (int i = 0; i < LANES; i++)
                    if (position + i < t->from[r] || position + i >= t->to[r]) to[i] = -INFINITY;
        }
    }
}

INLINE void add_values(const int rows, const kv_view *kv, int base, int end, float p[MOST_TILE][SEGMENT],
                       softmax_part *part) {
    int count = end - base < SEGMENT ? end - base : SEGMENT;
    const half *at[SEGMENT / LANES];
    for (int i = 0; i < count; i += LANES) at[i / LANES] = values_at(kv, base + i);
    for (int d = 0; d < kv->head_dim; d += LANES) {
        f32v sum[MOST_TILE];
        for (int r = 0; r < rows; r++) sum[r] = load(part->out[r] + d);
        for (int i = 0; i < count; i++) {
            f32v v = load_half(at[i / LANES] + (i % LANES) * kv->head_dim + d);
            for (int r = 0; r < rows; r++) sum[r] = fmadd(v, splat(p[r][i]), sum[r]);
        }
        for (int r = 0; r < rows; r++) store(part->out[r] + d, sum[r]);
    }
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
        score_segment(rows, kv, t, base, end, scores);
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
