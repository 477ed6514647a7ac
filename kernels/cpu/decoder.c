// One step of a Llama-family decoder on the CPU: all layers in one call, all threads walking the same phases.
//
// A phase is a number of parts that threads claim one by one; it ends when all are done, and only then does a thread go on.
// A thread that fell behind finds old phases exhausted and catches up. Each part's result depends on its own row (or row and
// output tile) alone, so a row's outputs do not depend on the batch, the chunk or the number of threads.
#include "attention.h"
#include "pool.h"
#include "sampling.h"

#define FEW_ROWS 4
#define MOST_PARTS 256
#define CLOSE 3.0f

typedef struct {
    const float *attn_norm, *mlp_norm, *q_norm, *k_norm;  // q_norm, k_norm may be null
    matrix qkv, out, gate_up, down;
    int32_t window;
} layer;

typedef struct {
    int32_t hidden, layers, heads, kv_heads, head_dim, rotary_dim, intermediate, vocabulary;
    int32_t block_size, most_tokens, threads;
    float eps, loudness;  // loudness: see `quantized`
    const layer *layer;
    const float *norm, *cos_sin;
    matrix head;
    const half *embedding;  // [vocabulary][hidden], or null where the head is the embedding
} shape;

typedef struct {
    int32_t tokens, sequences, table_width, logit_rows;
    const int64_t *ids, *positions, *slots, *logit_row;
    const int32_t *tables, *starts, *lengths;
    uint8_t *kv;           // [blocks][layers][Hk] pieces: what is used lies together, so that little memory is touched
    int64_t block_stride;  // in bytes
    float *logits;         // [logit_rows][vocabulary]
} step;

typedef struct {
    shape s;
    pool workers;
    step now;
    int64_t *logit_rows;  // of the step at hand; the caller's own may be gone when a slow thread looks
    draw_call drawing;
    float *weights;          // [threads][vocabulary], for draws
    candidate *candidates;   // [threads][vocabulary]
    float *x, *fused, *attended, *mlp;
    quantized shared, own[MOST_THREADS], queries;
    softmax_part *parts;
    int32_t *items;  // attention parts before each sequence, [most sequences + 1]
    int32_t spread;
    atomic_int *claims, *finished;  // parts taken and done, for each phase
    int phases;
} decoder;


static int allot_quantized(quantized *q, int rows, int width, float loudness) {
    size_t values = ((size_t)rows * width + 63) / 64 * 64, groups = (size_t)rows * (width / GROUP);
    q->high = aligned_alloc(64, values);
    q->low = aligned_alloc(64, values);
    q->loud = malloc(groups);
    q->scale = malloc(sizeof(float) * groups);
    q->sum = malloc(sizeof(float) * groups);
    q->most_rows = rows;
    q->loudness = loudness;
    return q->high && q->low && q->loud && q->scale && q->sum ? 0 : -1;
}

static void free_quantized(quantized *q) {
    free(q->high);
    free(q->low);
    free(q->loud);
    free(q->scale);
    free(q->sum);
}

static float *floats(size_t count) { return aligned_alloc(64, (count * sizeof(float) + 63) / 64 * 64); }

void ingle_decoder_close(decoder *d) {
    if (!d) return;
    if (d->workers.threads > 1) pool_settle(&d->workers), pool_close(&d->workers);
    free(d->x), free(d->fused), free(d->attended), free(d->mlp), free(d->parts), free(d->items), free(d->logit_rows), free(d->claims), free(d->finished);
    free(d->weights), free(d->candidates);
    free_quantized(&d->shared);
    free_quantized(&d->queries);
    for (int t = 0; t < MOST_THREADS; t++) free_quantized(&d->own[t]);
    free(d);
}

// Null when memory or threads are not to be had.
decoder *ingle_decoder_open(const shape *s) {
    decoder *d = calloc(1, sizeof *d);
    if (!d) return NULL;
    d->s = *s;
    int widest = s->hidden > s->intermediate ? s->hidden : s->intermediate;
    int q_width = s->heads * s->head_dim, qkv_width = (s->heads + 2 * s->kv_heads) * s->head_dim;
    widest = widest > q_width ? widest : q_width;
    size_t rows = (size_t)s->most_tokens;
    d->x = floats(rows * s->hidden);
    d->fused = floats(rows * qkv_width);
    d->attended = floats(rows * q_width);
    d->mlp = floats(rows * 2 * s->intermediate);
    d->phases = s->layers * 11 + 4;
    d->claims = calloc((size_t)d->phases, sizeof *d->claims);
    d->finished = calloc((size_t)d->phases, sizeof *d->finished);
    d->logit_rows = malloc(sizeof *d->logit_rows * rows);
    d->items = malloc(sizeof *d->items * (rows + 1));
    d->parts = aligned_alloc(64, sizeof *d->parts * MOST_PARTS);
    d->weights = floats((size_t)s->threads * ((s->vocabulary + LANES - 1) / LANES * LANES));
    d->candidates = malloc(sizeof *d->candidates * (size_t)s->threads * s->vocabulary);
    int failed = !d->weights || !d->candidates || !d->x || !d->fused || !d->attended || !d->mlp || !d->claims || !d->logit_rows || !d->finished || !d->items || !d->parts;
    failed |= allot_quantized(&d->shared, s->most_tokens, widest, s->loudness);
    d->queries.inputs = s->heads * padded(s->head_dim);
    failed |= allot_quantized(&d->queries, s->most_tokens, d->queries.inputs, 0);
    for (int t = 0; t < s->threads; t++) failed |= allot_quantized(&d->own[t], FEW_ROWS, widest, s->loudness);
    if (failed || pool_open(&d->workers, s->threads)) {
        ingle_decoder_close(d);
        return NULL;
    }
    return d;
}

// The next part of a phase that nobody has taken.
INLINE int claim(decoder *d, int phase) { return atomic_fetch_add_explicit(&d->claims[phase], 1, memory_order_acquire); }

INLINE void finish(decoder *d, int phase) { atomic_fetch_add_explicit(&d->finished[phase], 1, memory_order_release); }

// Wait until all parts of a phase are done.
INLINE void settle(decoder *d, int phase, int parts) {
    for (int spins = 0; atomic_load_explicit(&d->finished[phase], memory_order_acquire) < parts; spins++) relax(spins);
}

static void norm_row(const float *x, const float *weight, float eps, int width, float *out) {
    f32v squares = splat(0);
    for (int i = 0; i < width; i += LANES) {
        f32v v = load(x + i);
        squares = fmadd(v, v, squares);
    }
    float scale = 1.0f / sqrtf(sum_lanes(squares) / (float)width + eps);
    for (int i = 0; i < width; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
}

typedef void (*prepare_row)(decoder *d, const layer *l, int row, quantized *to, int at);

static void prepare_norm(decoder *d, const float *weight, int row, quantized *to, int at) {
    float normed[d->s.hidden] __attribute__((aligned(64)));
    norm_row(d->x + (size_t)row * d->s.hidden, weight, d->s.eps, d->s.hidden, normed);
    quantize_row(normed, to, at);
}

static void prepare_attn(decoder *d, const layer *l, int row, quantized *to, int at) {
    prepare_norm(d, l->attn_norm, row, to, at);
}

static void prepare_mlp(decoder *d, const layer *l, int row, quantized *to, int at) {
    prepare_norm(d, l->mlp_norm, row, to, at);
}

static void prepare_out(decoder *d, const layer *l, int row, quantized *to, int at) {
    (void)l;
    quantize_row(d->attended + (size_t)row * d->s.heads * d->s.head_dim, to, at);
}

static void prepare_down(decoder *d, const layer *l, int row, quantized *to, int at) {
    (void)l;
    int width = d->s.intermediate;
    const float *gate = d->mlp + (size_t)row * 2 * width, *up = gate + width;
    float mixed[width] __attribute__((aligned(64)));
    for (int i = 0; i < width; i += LANES) {
        f32v v = load(gate + i);
        store(mixed + i, v / (exp_lanes(-v) + 1.0f) * load(up + i));
    }
    quantize_row(mixed, to, at);
}

static void prepare_head(decoder *d, const layer *l, int row, quantized *to, int at) {
    (void)l;
    prepare_norm(d, d->s.norm, (int)d->logit_rows[row], to, at);
}

// Quantize the inputs of a matrix, then multiply. Few rows are prepared by every thread for itself, which is cheaper than a
// phase; a thread that does so too late works on moving data, but then finds no part left to spoil with it.
static int linear(decoder *d, int thread, int phase, int rows, const layer *l, prepare_row prepare, const matrix *m,
                  float *out, int stride, int add) {
    int few = rows <= FEW_ROWS;
    quantized in = few ? d->own[thread] : d->shared;
    in.inputs = m->inputs;
    if (few) {
        for (int row = 0; row < rows; row++) prepare(d, l, row, &in, row);
    } else {
        for (int row; (row = claim(d, phase)) < rows; finish(d, phase)) prepare(d, l, row, &in, row);
        settle(d, phase, rows);
    }
    phase++;
    // rows go by bands that stay in the second-level cache while a band of tiles passes over them
    const int band = 64, bands = (rows + band - 1) / band, tiles = tiles_of(m);
    const int take = few ? 4 : 2, groups = (tiles + take - 1) / take, parts = groups * bands;
    for (int part; (part = claim(d, phase)) < parts; finish(d, phase)) {
        int first_tile = part % groups * take, first_row = part / groups * band;
        int last_tile = first_tile + take < tiles ? first_tile + take : tiles;
        int last_row = first_row + band < rows ? first_row + band : rows;
        multiply(m, first_tile, last_tile, first_tile + take * d->s.threads, &in, first_row, last_row, out, stride, add);
    }
    settle(d, phase, parts);
    return phase + 1;
}

// Logits of 8-bit inputs are a few hundredths off. Those within e³ of the likeliest decide the next token: the tiles that
// hold one are computed again from 15 bits.
static void refine_row(decoder *d, int thread, int row) {
    const matrix *m = &d->s.head;
    float *logits = d->now.logits + (size_t)row * m->outputs;
    int whole_lanes = m->outputs / LANES * LANES, end = m->outputs;
    f32v highest = splat(-INFINITY);
    for (int i = 0; i < whole_lanes; i += LANES) highest = max_lanes(highest, load(logits + i));
    float most = max_of(highest);
    for (int i = whole_lanes; i < end; i++) most = logits[i] > most ? logits[i] : most;
    quantized in = d->own[thread];
    in.inputs = m->inputs;
    in.loudness = 0;
    prepare_head(d, NULL, row, &in, 0);
    for (int tile = 0; tile < tiles_of(m); tile++) {
        int first = tile * LANES, last = first + LANES < end ? first + LANES : end, close = 0;
        for (int i = first; i < last; i++) close |= logits[i] >= most - CLOSE;
        if (close) tile_block(1, 1, m, tile, &in, 0, logits, end, 0);
    }
}

static void rotate(float *head, const float *cos_sin, int rotary) {
    int halfway = rotary / 2, i = 0;
    float *other = head + halfway;
    const float *cosines = cos_sin, *sines = cos_sin + halfway;
    for (; i + LANES <= halfway; i += LANES) {
        f32v a = load(head + i), b = load(other + i), c = load(cosines + i), s = load(sines + i);
        store(head + i, a * c - b * s);
        store(other + i, b * c + a * s);
    }
    for (; i < halfway; i++) {
        float a = head[i], b = other[i], c = cosines[i], s = sines[i];
        head[i] = a * c - b * s;
        other[i] = b * c + a * s;
    }
}

// Bytes of `count` numbers, a multiple of 16, with 128 added; returns their scale.
static float quantize_bytes(const float *x, int count, uint8_t *to) {
    f32v most = splat(0);
    for (int i = 0; i < count; i += LANES) most = max_lanes(most, max_lanes(load(x + i), -load(x + i)));
    float top = max_of(most), inverse = top > 0 ? MOST_8 / top : 0.0f;
    for (int i = 0; i < count; i += LANES) store_bytes((int8_t *)to + i, nearest(load(x + i) * inverse) + ADDED);
    return top / MOST_8;
}

static void place_key(const float *k, uint8_t *piece, float *scales, int offset, int width, int block) {
    uint8_t bytes[MOST_HEAD_DIM];
    for (int g = 0; g < width / GROUP; g++)
        scales[g * block + offset] = quantize_bytes(k + g * GROUP, GROUP, bytes + g * GROUP);
    for (int d = 0; d < width; d += 4) memcpy(piece + (size_t)d * block + offset * 4, bytes + d, 4);
}

static void place_value(const float *v, uint8_t *piece, float *scales, int offset, int width, int block) {
    uint8_t bytes[MOST_HEAD_DIM];
    scales[width / GROUP * block + offset] = quantize_bytes(v, width, bytes);
    uint8_t *to = piece + (size_t)block * width + (size_t)(offset / 4) * width * 4 + offset % 4;
    for (int d = 0; d < width; d++) to[d * 4] = bytes[d];
}

// Norms and rotation of one token's heads; its queries are quantized, its key and value go to the cache.
static void place_row(decoder *d, const layer *l, int index, int row) {
    const shape *s = &d->s;
    const step *n = &d->now;
    int dim = s->head_dim, block = s->block_size, width = padded(dim);
    float *fused = d->fused + (size_t)row * (s->heads + 2 * s->kv_heads) * dim;
    const float *cos_sin = s->cos_sin + (size_t)n->positions[row] * s->rotary_dim;
    float head[MOST_HEAD_DIM] __attribute__((aligned(64))) = {0};
    float scale = 1.0f / sqrtf((float)dim);
    int64_t slot = n->slots[row];
    size_t bytes = piece_bytes(dim, block);
    uint8_t *pieces = slot < 0 ? NULL : n->kv + (size_t)(slot / block) * n->block_stride + (size_t)index * s->kv_heads * bytes;
    for (int h = 0; h < s->heads + 2 * s->kv_heads; h++) {
        memcpy(head, fused + h * dim, sizeof(float) * (size_t)dim);
        int key = h - s->heads, value = key - s->kv_heads;
        const float *weight = key < 0 ? l->q_norm : l->k_norm;
        if (value < 0) {
            if (weight) norm_row(head, weight, s->eps, dim, head);
            rotate(head, cos_sin, s->rotary_dim);
        }
        if (key < 0) {
            for (int i = 0; i < dim; i += LANES) store(head + i, load(head + i) * scale);
            for (int g = 0; g < width / GROUP; g++)
                quantize_group(head + g * GROUP, largest_of(head + g * GROUP), 1, &d->queries, row, h * (width / GROUP) + g);
        } else if (pieces) {
            uint8_t *piece = pieces + (size_t)(value < 0 ? key : value) * bytes;
            float *scales = (float *)(piece + (size_t)2 * block * width);
            (value < 0 ? place_key : place_value)(head, piece, scales, (int)(slot % block), width, block);
        }
    }
}

typedef struct {
    kv_view kv;
    tile_rows_view rows;
    float *out[MOST_TILE];
    int count, longest;
} attention_tile;

static int32_t group_total(const tile_rows_view *t, int r, int group) {
    static const uint8_t ones[LANES * 4] = {[0 ... LANES * 4 - 1] = 1};
    i32v high = whole(0), low = whole(0);
    for (int i = group * GROUP; i < (group + 1) * GROUP; i += 4) {
        high = dot_four(high, ones, t->high[r] + i);
        low = dot_four(low, ones, t->low[r] + i);
    }
    return high[0] * 128 + low[0];
}

static attention_tile open_tile(decoder *d, const layer *l, int index, int sequence, int head, int tile) {
    const shape *s = &d->s;
    const step *n = &d->now;
    int share = s->heads / s->kv_heads, dim = s->head_dim;
    int first = n->starts[sequence], queries = n->starts[sequence + 1] - first;
    size_t piece = piece_bytes(dim, s->block_size);
    int width = padded(dim), groups = width / GROUP;
    attention_tile t = {.kv = {n->kv + (size_t)index * s->kv_heads * piece, n->tables + (size_t)sequence * n->table_width,
                               (size_t)n->block_stride, piece, s->block_size,
                               __builtin_ctz((unsigned)s->block_size), head, width}};
    int left = queries * share - tile * MOST_TILE;
    t.count = left < MOST_TILE ? left : MOST_TILE;
    for (int r = 0; r < t.count; r++) {
        int flat = tile * MOST_TILE + r, token = flat / share, q_head = head * share + flat % share;
        int position = n->lengths[sequence] - queries + token;
        size_t query = (size_t)(first + token) * s->heads + q_head;
        t.rows.high[r] = d->queries.high + query * width;
        t.rows.low[r] = d->queries.low + query * width;
        t.rows.scale[r] = d->queries.scale + query * groups;
        for (int g = 0; g < groups; g++) t.rows.added[r][g] = ADDED * group_total(&t.rows, r, g);
        t.rows.to[r] = position + 1;
        t.rows.from[r] = l->window > 0 && position + 1 > l->window ? position + 1 - l->window : 0;
        t.out[r] = d->attended + ((size_t)(first + token) * s->heads + q_head) * dim;
        t.longest = t.rows.to[r] > t.longest ? t.rows.to[r] : t.longest;
    }
    return t;
}

static void close_row(float *out, float sum, int dim) {
    float scale = sum > 0 ? 1.0f / sum : 0.0f;
    for (int i = 0; i < dim; i += LANES) store(out + i, load(out + i) * scale);
}

static void attend(decoder *d, const layer *l, int index, int sequence, int head, int tile) {
    attention_tile t = open_tile(d, l, index, sequence, head, tile);
    int dim = d->s.head_dim;
    float max[MOST_TILE], sum[MOST_TILE];
    softmax_part part;
    for (int r = 0; r < t.count; r++) {
        max[r] = -INFINITY, sum[r] = 0;
        memset(t.out[r], 0, sizeof(float) * (size_t)dim);
    }
    for (int start = 0; start < t.longest; start += PARTITION) {
        attend_partition(t.count, &t.kv, &t.rows, start, &part);
        for (int r = 0; r < t.count; r++)
            merge_part(&max[r], &sum[r], t.out[r], part.max[r], part.sum[r], part.out[r], dim);
    }
    for (int r = 0; r < t.count; r++) close_row(t.out[r], sum[r], dim);
}

static int tiles_of_sequence(const decoder *d, int sequence) {
    int queries = d->now.starts[sequence + 1] - d->now.starts[sequence];
    return (queries * (d->s.heads / d->s.kv_heads) + MOST_TILE - 1) / MOST_TILE;
}

// Long contexts of few sequences are spread over threads by partition, and merged after.
static int attention(decoder *d, int phase, const layer *l, int index) {
    const step *n = &d->now;
    int parts = d->items[n->sequences], kv_heads = d->s.kv_heads;
    if (d->spread) {
        int wide = d->spread, all = parts * wide;
        for (int item; (item = claim(d, phase)) < all; finish(d, phase)) {
            int tile = item / wide, sequence = 0;
            while (d->items[sequence + 1] <= tile) sequence++;
            int within = tile - d->items[sequence];
            attention_tile t = open_tile(d, l, index, sequence, within % kv_heads, within / kv_heads);
            int start = item % wide * PARTITION;
            if (start < t.longest) attend_partition(t.count, &t.kv, &t.rows, start, &d->parts[item]);
        }
        settle(d, phase, all);
        phase++;
        for (int tile; (tile = claim(d, phase)) < parts; finish(d, phase)) {
            int sequence = 0;
            while (d->items[sequence + 1] <= tile) sequence++;
            int within = tile - d->items[sequence];
            attention_tile t = open_tile(d, l, index, sequence, within % kv_heads, within / kv_heads);
            for (int r = 0; r < t.count; r++) {
                float max = -INFINITY, sum = 0;
                memset(t.out[r], 0, sizeof(float) * (size_t)d->s.head_dim);
                for (int w = 0; w * PARTITION < t.longest; w++) {
                    const softmax_part *p = &d->parts[tile * wide + w];
                    merge_part(&max, &sum, t.out[r], p->max[r], p->sum[r], p->out[r], d->s.head_dim);
                }
                close_row(t.out[r], sum, d->s.head_dim);
            }
        }
    } else {
        int sequence = 0;
        phase++;
        for (int item; (item = claim(d, phase)) < parts; finish(d, phase)) {
            while (d->items[sequence + 1] <= item) sequence++;
            int within = item - d->items[sequence];
            attend(d, l, index, sequence, within % kv_heads, within / kv_heads);
        }
    }
    settle(d, phase, parts);
    return phase + 1;
}

static void embed(decoder *d, int row) {
    int64_t id = d->now.ids[row];
    float *to = d->x + (size_t)row * d->s.hidden;
    if (!d->s.embedding) {
        unpack_row(&d->s.head, (int)id, to);
        return;
    }
    const half *from = d->s.embedding + (size_t)id * d->s.hidden;
    for (int i = 0; i < d->s.hidden; i += LANES) store(to + i, load_half(from + i));
}

static void walk(void *decoder_, int thread) {
    decoder *d = decoder_;
    const shape *s = &d->s;
    const step *n = &d->now;
    int rows = n->tokens, phase = 0, dim = s->head_dim;
    for (int row; (row = claim(d, phase)) < rows; finish(d, phase)) embed(d, row);
    settle(d, phase, rows);
    phase++;
    for (int index = 0; index < s->layers; index++) {
        const layer *l = &s->layer[index];
        int fused = (s->heads + 2 * s->kv_heads) * dim;
        phase = linear(d, thread, phase, rows, l, prepare_attn, &l->qkv, d->fused, fused, 0);
        for (int row; (row = claim(d, phase)) < rows; finish(d, phase)) place_row(d, l, index, row);
        settle(d, phase, rows);
        phase = attention(d, phase + 1, l, index);
        phase = linear(d, thread, phase, rows, l, prepare_out, &l->out, d->x, s->hidden, 1);
        phase = linear(d, thread, phase, rows, l, prepare_mlp, &l->gate_up, d->mlp, 2 * s->intermediate, 0);
        phase = linear(d, thread, phase, rows, l, prepare_down, &l->down, d->x, s->hidden, 1);
    }
    phase = linear(d, thread, phase, n->logit_rows, NULL, prepare_head, &s->head, n->logits, s->vocabulary, 0);
    for (int row; (row = claim(d, phase)) < n->logit_rows; finish(d, phase)) refine_row(d, thread, row);
    settle(d, phase, n->logit_rows);
}

// Runs the step; 0, or -1 where it does not fit what was allotted.
int ingle_decoder_step(decoder *d, const step *n) {
    if (n->tokens > d->s.most_tokens || n->tokens <= 0 || n->sequences > n->tokens || n->logit_rows > n->tokens) return -1;
    pool_settle(&d->workers);
    d->now = *n;
    memcpy(d->logit_rows, n->logit_row, sizeof *n->logit_row * (size_t)n->logit_rows);
    d->items[0] = 0;
    int longest = 0;
    for (int q = 0; q < n->sequences; q++) {
        d->items[q + 1] = d->items[q] + tiles_of_sequence(d, q) * d->s.kv_heads;
        longest = n->lengths[q] > longest ? n->lengths[q] : longest;
    }
    int wide = (longest + PARTITION - 1) / PARTITION, parts = d->items[n->sequences];
    d->spread = wide > 1 && parts < 8 * d->s.threads && parts * wide <= MOST_PARTS ? wide : 0;
    memset(d->claims, 0, sizeof *d->claims * (size_t)d->phases);
    memset(d->finished, 0, sizeof *d->finished * (size_t)d->phases);
    pool_run(&d->workers, walk, d);
    return 0;
}

// The normed state behind a logits row of the last step, [hidden]; 0, or -1 where there is no such row.
int ingle_decoder_hidden(decoder *d, int row, float *out) {
    if (row < 0 || row >= d->now.logit_rows) return -1;
    norm_row(d->x + (size_t)d->logit_rows[row] * d->s.hidden, d->s.norm, d->s.eps, d->s.hidden, out);
    return 0;
}

static void draw_rows(void *decoder_, int thread) {
    decoder *d = decoder_;
    size_t padded = (size_t)(d->s.vocabulary + LANES - 1) / LANES * LANES;
    int rows = d->drawing.rows;
    for (int row; (row = claim(d, 0)) < rows; finish(d, 0))
        d->drawing.tokens[row] = draw_row(&d->drawing, row, d->weights + thread * padded,
                                          d->candidates + (size_t)thread * d->s.vocabulary);
    settle(d, 0, rows);
}

// A token for each row of logits; 0, or -1 where the vocabulary is another.
int ingle_decoder_draw(decoder *d, const draw_call *call) {
    if (call->vocabulary != d->s.vocabulary) return -1;
    pool_settle(&d->workers);
    d->drawing = *call;
    atomic_store(&d->claims[0], 0);
    atomic_store(&d->finished[0], 0);
    if (call->rows == 1)
        draw_rows(d, 0);
    else
        pool_run(&d->workers, draw_rows, d);
    return 0;
}

// Bytes of one layer's and key head's share of a block.
int64_t ingle_kv_piece(int head_dim, int block) { return (int64_t)piece_bytes(head_dim, block); }

int ingle_sizes(int which) {
    switch (which) {
        case 0: return (int)sizeof(matrix);
        case 1: return (int)sizeof(layer);
        case 2: return (int)sizeof(shape);
        case 3: return (int)sizeof(step);
        case 4: return (int)sizeof(draw_call);
        default: return -1;
    }
}
