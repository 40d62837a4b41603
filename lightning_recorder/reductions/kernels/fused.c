/* Statistics of one array in one pass through memory, added to a row of state, the norm of many arrays, and the launch
 * of the kernels that do the same on a GPU.
 *
 * The layout of the row is defined in row.py. fused.py passes it to the compiler: SLOT_<NAME> is the index of a number,
 * and HISTOGRAM is the index of the first bin. There are BINS bins, one for each value of the upper bits of a float.
 *
 * A block of values stays in the L1 cache while it is summed, its deviations from a mean are squared, and its bins are
 * counted. Blocks are merged like states (Chan, Golub & LeVeque 1979), in double, so a small variance next to a large
 * mean is not lost, whatever the order of the values.
 */
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define BLOCK 2048
#define LANES 16
#define SQUARES 64 /* separate sums of squares, for the same reason and for wider vectors */
#define PAD 32 /* prevents false dependencies in the processor between entries with the same index in two tables */
#define FEW 32768 /* fewer values than this are not worth the start of another thread */
#define MOST_THREADS 256
#define FEWER 1024 /* fewer values than this are not worth reading the tables */
#define WIDEST 256 /* columns of a matrix whose spread is computed */
#define LINE 32 /* bins of a table per cache line */

enum { FEW_VALUES, ALL_VALUES, SAMPLED_VALUES }; /* how to count the values in the bins */

typedef struct {
  int64_t count; /* an upper bound: no table holds more than a fourth of this number */
  uint16_t tables[4][BINS + PAD]; /* several to decouple equal neighbors, and small to stay cached */
} Tables;

typedef struct {
  double count, mean, m2, min, max;
  int64_t zeros, nans, infinities;
  const int64_t *place, *last; /* the remaining sampled places */
  double *bins;
  Tables *tables;
} Part;

static void merge(double *count, double *mean, double *m2, double n, double mu, double q) {
  if (n == 0) return;
  double total = *count + n, share = n / total, delta = mu - *mean;
  *m2 += q + delta * delta * *count * share;
  *mean += delta * share;
  *count = total;
}

/* Count LANES floats. Neighbors, which are often equal, are counted in different tables. Two floats are loaded as one
   word. Compilers would load and shift single floats as a vector, whose lanes take three times as long to extract. */
static inline void count_lanes(const void *x, uint16_t (*restrict tables)[BINS + PAD]) {
  uint64_t words[LANES / 2];
  memcpy(words, x, sizeof words);
  for (int pair = 0; pair < LANES / 2; pair++) {
    tables[2 * pair & 3][(uint32_t)words[pair] >> BIN_SHIFT]++;
    tables[(2 * pair + 1) & 3][words[pair] >> (32 + BIN_SHIFT)]++;
  }
}

/* Process one block of TYPE. UINT holds its bits, and EXPONENT is the exponent of nonfinite values. Nearly every block
   is entirely finite. In other blocks, nonfinite values are removed and the loop runs again. Deviations are taken from
   the mean of the previous blocks. If this mean is so far off that the squares lose precision, the squares are summed
   again around the mean of the block. There are LANES separate sums, because a single sum would wait for each
   addition. */
#define DEFINE_BLOCK(NAME, TYPE, UINT, EXPONENT, MASK)                                                                 \
  static void NAME(const TYPE *restrict x, int n, Part *part) {                                                        \
    TYPE finite[BLOCK];                                                                                                \
    double pivot = part->mean, sum, square;                                                                            \
    TYPE low, high;                                                                                                    \
    UINT largest;                                                                                                      \
    int count = n, zeros, nans = 0;                                                                                    \
    for (;;) {                                                                                                         \
      double sums[LANES] = {0}, squares[LANES] = {0};                                                                  \
      TYPE lows[LANES], highs[LANES];                                                                                  \
      UINT sizes[LANES] = {0};                                                                                         \
      int32_t none[LANES] = {0};                                                                                       \
      int whole = count / LANES * LANES;                                                                               \
      sum = square = 0, low = INFINITY, high = -INFINITY, largest = 0, zeros = 0;                                      \
      for (int lane = 0; lane < LANES; lane++) lows[lane] = INFINITY, highs[lane] = -INFINITY;                         \
      for (int i = 0; i < whole; i += LANES) {                                                                         \
        for (int lane = 0; lane < LANES; lane++) {                                                                     \
          TYPE value = x[i + lane];                                                                                    \
          double deviation = (double)value - pivot;                                                                    \
          UINT size;                                                                                                   \
          memcpy(&size, x + i + lane, sizeof size);                                                                    \
          size &= MASK;                                                                                                \
          sums[lane] += deviation;                                                                                     \
          squares[lane] += deviation * deviation;                                                                      \
          lows[lane] = value < lows[lane] ? value : lows[lane];                                                        \
          highs[lane] = value > highs[lane] ? value : highs[lane];                                                     \
          sizes[lane] = size > sizes[lane] ? size : sizes[lane];                                                       \
          none[lane] += size == 0;                                                                                     \
        }                                                                                                              \
      }                                                                                                                \
      for (int i = whole; i < count; i++) {                                                                            \
        int lane = i - whole;                                                                                          \
        double deviation = (double)x[i] - pivot;                                                                       \
        UINT size;                                                                                                     \
        memcpy(&size, x + i, sizeof size);                                                                             \
        size &= MASK;                                                                                                  \
        sums[lane] += deviation;                                                                                       \
        squares[lane] += deviation * deviation;                                                                        \
        lows[lane] = x[i] < lows[lane] ? x[i] : lows[lane];                                                            \
        highs[lane] = x[i] > highs[lane] ? x[i] : highs[lane];                                                         \
        sizes[lane] = size > sizes[lane] ? size : sizes[lane];                                                         \
        none[lane] += size == 0;                                                                                       \
      }                                                                                                                \
      for (int lane = 0; lane < LANES; lane++) {                                                                       \
        sum += sums[lane], square += squares[lane], zeros += none[lane];                                               \
        low = lows[lane] < low ? lows[lane] : low;                                                                     \
        high = highs[lane] > high ? highs[lane] : high;                                                                \
        largest = sizes[lane] > largest ? sizes[lane] : largest;                                                       \
      }                                                                                                                \
      if (largest < EXPONENT) break;                                                                                   \
      count = 0;                                                                                                       \
      for (int i = 0; i < n; i++) {                                                                                    \
        UINT size;                                                                                                     \
        memcpy(&size, x + i, sizeof size);                                                                             \
        size &= MASK;                                                                                                  \
        nans += size > EXPONENT;                                                                                       \
        if (size < EXPONENT) finite[count++] = x[i];                                                                   \
      }                                                                                                                \
      x = finite;                                                                                                      \
    }                                                                                                                  \
    double shift = count ? sum / count : 0, mean = pivot + shift, spread = square - sum * shift;                       \
    if (!(square <= 16 * spread)) {                                                                                    \
      double squares[LANES] = {0};                                                                                     \
      int whole = count / LANES * LANES;                                                                               \
      for (int i = 0; i < whole; i += LANES)                                                                           \
        for (int lane = 0; lane < LANES; lane++) {                                                                     \
          double deviation = (double)x[i + lane] - mean;                                                               \
          squares[lane] += deviation * deviation;                                                                      \
        }                                                                                                              \
      for (int i = whole; i < count; i++) squares[i - whole] += ((double)x[i] - mean) * ((double)x[i] - mean);         \
      spread = 0;                                                                                                      \
      for (int lane = 0; lane < LANES; lane++) spread += squares[lane];                                                \
    }                                                                                                                  \
    merge(&part->count, &part->mean, &part->m2, count, mean, spread);                                                  \
    part->min = low < part->min ? low : part->min;                                                                     \
    part->max = high > part->max ? high : part->max;                                                                   \
    part->zeros += zeros;                                                                                              \
    part->nans += nans;                                                                                                \
    part->infinities += n - count - nans;                                                                              \
  }

DEFINE_BLOCK(block_of_floats, float, uint32_t, 0x7f800000u, 0x7fffffffu)
DEFINE_BLOCK(block_of_doubles, double, uint64_t, 0x7ff0000000000000u, 0x7fffffffffffffffu)

/* Add the tables to the bins. Touches as few bins as possible, because they have left the cache. */
static void empty_tables(Part *part) {
  uint16_t(*tables)[BINS + PAD] = part->tables->tables;
  if (!part->tables->count) return;
#pragma omp critical(lightning_recorder_bins)
  for (int from = 0; from < BINS; from += LINE) {
    uint32_t sums[LINE], any = 0;
    for (int i = 0; i < LINE; i++) {
      sums[i] = (uint32_t)tables[0][from + i] + tables[1][from + i] + tables[2][from + i] + tables[3][from + i];
      any |= sums[i];
    }
    if (!any) continue;
    for (int i = 0; i < LINE; i++) part->bins[from + i] += sums[i];
    for (int table = 0; table < 4; table++) memset(tables[table] + from, 0, LINE * sizeof **tables);
  }
  part->tables->count = 0;
}

/* Make room in the tables for a full block. */
static void make_room(Part *part) {
  if (part->tables->count + BLOCK > 4 * UINT16_MAX) empty_tables(part);
  part->tables->count += BLOCK;
}

/* Count the values of a block. */
static void count_all(const float *x, int n, Part *part) {
  uint16_t(*tables)[BINS + PAD] = part->tables->tables;
  int i = 0;
  for (; i + LANES <= n; i += LANES) count_lanes(x + i, tables);
  for (; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    tables[i & 3][bits >> BIN_SHIFT]++;
  }
}

/* Count the sampled values of a block while it is in the cache. The block starts at index `at` of the array. */
static void count_places(const float *x, int64_t at, int n, Part *part) {
  uint16_t(*tables)[BINS + PAD] = part->tables->tables;
  if (part->tables->count + 4 * n > 4 * UINT16_MAX) empty_tables(part);
  for (; part->place < part->last && *part->place < at + n; part->place++) {
    uint32_t bits;
    memcpy(&bits, x + (*part->place - at), sizeof bits);
    tables[*part->place & 3][bits >> BIN_SHIFT]++;
    part->tables->count += 4; /* as if each table had been incremented */
  }
}

/* Count few values directly in the bins, because reading all tables would take longer. */
static void count_few(const float *x, int n, double *bins) {
  for (int i = 0; i < n; i++) {
    uint32_t bits;
    memcpy(&bits, x + i, sizeof bits);
    bins[bits >> BIN_SHIFT]++;
  }
}

static void count_block(const float *x, int64_t at, int n, int how, Part *part) {
  if (how == FEW_VALUES) {
    count_few(x, n, part->bins);
  } else if (how == ALL_VALUES) {
    make_room(part);
    count_all(x, n, part);
  } else {
    count_places(x, at, n, part);
  }
}

static void take_floats(const float *x, int64_t at, int n, int how, Part *part) {
  block_of_floats(x, n, part);
  count_block(x, at, n, how, part);
}

static void part_of_floats(const void *data, int64_t from, int64_t to, double factor, int how, Part *part) {
  const float *values = data;
  float scale = (float)factor, scaled[BLOCK];
  for (int64_t at = from; at < to; at += BLOCK) {
    int n = to - at < BLOCK ? (int)(to - at) : BLOCK;
    const float *x = values + at;
    if (scale != 1) {
      for (int i = 0; i < n; i++) scaled[i] = x[i] * scale;
      x = scaled;
    }
    take_floats(x, at, n, how, part);
  }
}

/* Process values of TYPE as doubles. */
#define DEFINE_WIDE(NAME, TYPE)                                                                                        \
  static void NAME(const void *data, int64_t from, int64_t to, double factor, int how, Part *part) {                   \
    const TYPE *values = data;                                                                                         \
    double scaled[BLOCK];                                                                                              \
    float narrow[BLOCK];                                                                                               \
    for (int64_t at = from; at < to; at += BLOCK) {                                                                    \
      int n = to - at < BLOCK ? (int)(to - at) : BLOCK;                                                                \
      for (int i = 0; i < n; i++) {                                                                                    \
        double x = scaled[i] = (double)values[at + i] * factor;                                                        \
        /* Finite values stay finite: they are counted in the end bin of their sign. */                                \
        float most = x > 0 ? FLT_MAX : -FLT_MAX;                                                                       \
        narrow[i] = fabs(x) == INFINITY || !(fabs(x) > FLT_MAX) ? (float)x : most;                                     \
      }                                                                                                                \
      block_of_doubles(scaled, n, part);                                                                               \
      count_block(narrow, at, n, how, part);                                                                           \
    }                                                                                                                  \
  }

DEFINE_WIDE(part_of_doubles, double)
DEFINE_WIDE(part_of_bytes, uint8_t) /* and booleans */
DEFINE_WIDE(part_of_int8, int8_t)
DEFINE_WIDE(part_of_int16, int16_t)
DEFINE_WIDE(part_of_int32, int32_t)
DEFINE_WIDE(part_of_int64, int64_t)

static void part_of_bfloats(const void *data, int64_t from, int64_t to, double factor, int how, Part *part) {
  const uint16_t *values = data;
  float scale = (float)factor, wide[BLOCK];
  uint32_t bits[BLOCK];
  for (int64_t at = from; at < to; at += BLOCK) {
    int n = to - at < BLOCK ? (int)(to - at) : BLOCK;
    for (int i = 0; i < n; i++) bits[i] = (uint32_t)values[at + i] << 16;
    memcpy(wide, bits, n * sizeof *wide);
    if (scale != 1)
      for (int i = 0; i < n; i++) wide[i] *= scale;
    take_floats(wide, at, n, how, part);
  }
}

typedef void (*PartOf)(const void *, int64_t, int64_t, double, int, Part *);

static const PartOf PARTS[] = {part_of_floats, part_of_doubles, part_of_bfloats, part_of_bytes,
                               part_of_int8,   part_of_int16,   part_of_int32,   part_of_int64};

/* Add the statistics of numel values, each times a factor, to the row. `kind` is an index of PARTS. If `sampled` is
   negative, all values are counted in the bins. Otherwise, the values at the ascending `places` are counted, or all
   values if there are no places, and an additional slot counts all values. */
void add_statistics(const void *data, int64_t numel, int kind, double factor, const int64_t *places, int64_t sampled,
                    int threads, double *row) {
  int how = sampled >= 0 && places ? SAMPLED_VALUES : numel < FEWER ? FEW_VALUES : ALL_VALUES;
  if (numel < FEW || threads < 1) threads = 1;
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  Part parts[threads];
  int64_t share = ((numel + threads - 1) / threads + BLOCK - 1) / BLOCK * BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1)
  for (int t = 0; t < threads; t++) {
    int64_t from = t * share, to = from + share < numel ? from + share : numel;
    static _Thread_local Tables own; /* one per thread, empty between two calls */
    Part part = {.min = INFINITY, .max = -INFINITY, .place = places, .last = places, .bins = row + HISTOGRAM, .tables = &own};
    if (how == SAMPLED_VALUES) part.last += sampled;
    while (part.place < part.last && *part.place < from) part.place++;
    if (from < to) PARTS[kind](data, from, to, factor, how, &part);
    empty_tables(&part);
    parts[t] = part;
  }
  row[SLOT_NUMEL] += (double)numel;
  for (int t = 0; t < threads; t++) {
    const Part *part = parts + t;
    merge(row + SLOT_COUNT, row + SLOT_MEAN, row + SLOT_M2, part->count, part->mean, part->m2);
    row[SLOT_MIN] = part->min < row[SLOT_MIN] ? part->min : row[SLOT_MIN];
    row[SLOT_MAX] = part->max > row[SLOT_MAX] ? part->max : row[SLOT_MAX];
    row[SLOT_ZEROS] += (double)part->zeros;
    row[SLOT_NANS] += (double)part->nans;
    row[SLOT_INFINITIES] += (double)part->infinities;
  }
  if (sampled >= 0) row[SAMPLED_NUMEL] += (double)numel;
}

/* Return the sum of the squares of floats. The squares of a block are summed as floats, like in torch, and the sums of
   the blocks as doubles. */
static double squares_of(const float *x, int64_t n) {
  double sum = 0;
  for (int64_t at = 0; at < n; at += BLOCK) {
    int count = n - at < BLOCK ? (int)(n - at) : BLOCK, whole = count / SQUARES * SQUARES;
    float squares[SQUARES] = {0}, total = 0;
    for (int i = 0; i < whole; i += SQUARES)
      for (int lane = 0; lane < SQUARES; lane++) squares[lane] += x[at + i + lane] * x[at + i + lane];
    for (int i = whole; i < count; i++) squares[i - whole] += x[at + i] * x[at + i];
    for (int lane = 0; lane < SQUARES; lane++) total += squares[lane];
    sum += total;
  }
  return sum;
}

/* Return the norm of all floats in several arrays. `arrays`, [count, 2], has the address and the length of each. */
double norm_of_floats(const int64_t *arrays, int64_t count, int threads) {
  int64_t numel = 0;
  for (int64_t i = 0; i < count; i++) numel += arrays[2 * i + 1];
  if (numel < FEW || threads < 1) threads = 1;
  if (threads > MOST_THREADS) threads = MOST_THREADS;
  int64_t share = (numel + threads - 1) / threads;
  double sum = 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1) if (threads > 1) reduction(+ : sum)
  for (int t = 0; t < threads; t++) {
    int64_t from = t * share, to = from + share, at = 0;
    for (int64_t i = 0; i < count && at < to; i++) {
      int64_t first = from > at ? from - at : 0, n = arrays[2 * i + 1], last = to - at < n ? to - at : n;
      if (first < last) sum += squares_of((const float *)(intptr_t)arrays[2 * i] + first, last - first);
      at += n;
    }
  }
  return sqrt(sum);
}

/* Read every `along`-th value from index `from` on, as doubles. */
static void read_doubles(const void *data, int kind, int64_t from, int64_t along, int count, double *restrict to) {
  const float *floats = (const float *)data + from;
  const double *doubles = (const double *)data + from;
  const uint16_t *halves = (const uint16_t *)data + from;
  if (kind == 0 && along == 1) {
    for (int i = 0; i < count; i++) to[i] = floats[i];
  } else if (kind == 0) {
    for (int i = 0; i < count; i++) to[i] = floats[i * along];
  } else if (kind == 1) {
    for (int i = 0; i < count; i++) to[i] = doubles[i * along];
  } else {
    for (int i = 0; i < count; i++) {
      uint32_t bits = (uint32_t)halves[i * along] << 16;
      float value;
      memcpy(&value, &bits, sizeof value);
      to[i] = value;
    }
  }
}

/* Add to the state the sum of the squared deviations of a matrix, [rows, columns], from its column means, and the sum
   of its squares. Every `down`-th row and every `along`-th column are read, at most WIDEST columns. The first row is
   subtracted, so that the deviations of equal rows are zero. Nothing is added if a value is not finite. */
void add_spread(const void *data, int64_t rows, int64_t columns, int64_t down, int64_t along, int kind, double *state) {
  double first[WIDEST], x[WIDEST], sums[WIDEST] = {0}, squares[WIDEST] = {0}, totals[WIDEST] = {0};
  double deviation = 0, total = 0;
  int count = (int)((columns + along - 1) / along);
  int64_t n = (rows + down - 1) / down;
  read_doubles(data, kind, 0, along, count, first);
  for (int64_t row = 0; row < rows; row += down) {
    read_doubles(data, kind, row * columns, along, count, x);
    for (int i = 0; i < count; i++) {
      double delta = x[i] - first[i];
      sums[i] += delta, squares[i] += delta * delta, totals[i] += x[i] * x[i];
    }
  }
  for (int i = 0; i < count; i++) {
    double rest = squares[i] - sums[i] * sums[i] / (double)n;
    deviation += rest > 0 ? rest : 0, total += totals[i];
  }
  if (!(total < INFINITY) || !(deviation < INFINITY)) return;
  state[0] += deviation, state[1] += total;
}

/* Copy states, [rows, width], without the empty bins of their histograms. The copy has all slots but the histogram,
   [rows, width - BINS]; the number of nonempty bins of each row as int64; the counts of these bins; and the indices of
   these bins as uint16. Return the size in doubles. `to` must have room for rows * (width + 1 + BINS / 4) doubles. */
int64_t compact_states(const double *states, int64_t rows, int64_t width, double *to) {
  int64_t found = 0, size;
  double *counts = to + rows * (width - BINS + 1);
  uint16_t *bins = (uint16_t *)(counts + rows * BINS);
  for (int64_t row = 0; row < rows; row++) {
    const double *state = states + row * width, *histogram = state + HISTOGRAM;
    int64_t before = found;
    memcpy(to + row * (width - BINS), state, HISTOGRAM * sizeof *state);
    memcpy(to + row * (width - BINS) + HISTOGRAM, histogram + BINS, (width - HISTOGRAM - BINS) * sizeof *state);
    for (int from = 0; from < BINS; from += LINE) {
      uint64_t bits[LINE], any = 0;
      memcpy(bits, histogram + from, sizeof bits);
      for (int i = 0; i < LINE; i++) any |= bits[i];
      if (!any) continue;
      for (int i = 0; i < LINE; i++)
        if (bits[i]) bins[found] = (uint16_t)(from + i), counts[found++] = histogram[from + i];
    }
    size = found - before;
    memcpy(to + rows * (width - BINS) + row, &size, sizeof size);
  }
  memmove(counts + found, bins, found * sizeof *bins);
  return counts + found + (found + 3) / 4 - to;
}

#define SUM_OF(type)                                                    \
  for (int64_t i = 0; i < count; i++, at += step) {                     \
    type read;                                                          \
    memcpy(&read, at, sizeof read);                                     \
    int64_t value = read;                                               \
    sum += (uint64_t)(value ^ (value >> shift)) * factors[i];           \
  }                                                                     \
  return sum;

/* Return the sum of value * factor. Each kind has its own loop, because a switch inside the loop doubles the time. */
static uint64_t sum_of(const char *at, int kind, int shift, int64_t count, int64_t step, const uint64_t *factors) {
  uint64_t sum = 0;
  switch (kind) {
    case 0: SUM_OF(uint8_t)
    case 1: SUM_OF(int8_t)
    case 2: SUM_OF(int16_t)
    case 3: SUM_OF(int32_t)
    default: SUM_OF(int64_t)
  }
}

/* Join the numbers of the rows of an array with those of earlier arrays: `all` = `all` * scale + sum of value * factor.
   The bits of a value from `shift` on are mixed into its low bits, which are zero for round floats and would be zero in
   a product, too. `sizes` and `steps` have the sizes to read and the distances in bytes of `dims` dimensions, rows
   first. If `some` is not NULL, it is joined in the same way with its own scale. After the last array, the bits of
   `all` are mixed as in splitmix64, with signed shifts. */
void join_rows(const char *data, int kind, int shift, int dims, const int64_t *sizes, const int64_t *steps,
               const uint64_t *factors, uint64_t scale, uint64_t *all, uint64_t some_scale, uint64_t *some, int is_last) {
  int64_t of_row = 1, count = dims > 1 ? sizes[dims - 1] : 1, step = dims > 1 ? steps[dims - 1] : 0;
  for (int dim = 1; dim < dims; dim++) of_row *= sizes[dim];
  for (int64_t row = 0; row < sizes[0]; row++) {
    int64_t place[64] = {0};
    const char *at = data + row * steps[0];
    uint64_t sum = 0;
    for (int64_t i = 0; i < of_row; i += count) {
      sum += sum_of(at, kind, shift, count, step, factors + i);
      for (int dim = dims - 2; dim > 0; dim--) {
        at += steps[dim];
        if (++place[dim] < sizes[dim]) break;
        at -= steps[dim] * sizes[dim], place[dim] = 0;
      }
    }
    uint64_t joined = all[row] * scale + sum;
    if (is_last) {
      joined = (joined ^ (uint64_t)((int64_t)joined >> 30)) * 0xbf58476d1ce4e5b9u;
      joined = (joined ^ (uint64_t)((int64_t)joined >> 27)) * 0x94d049bb133111ebu;
      joined ^= (uint64_t)((int64_t)joined >> 31);
    }
    all[row] = joined;
    if (some) some[row] = some[row] * some_scale + sum;
  }
}

typedef int (*LaunchKernel)(void *kernel, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned threads_y,
                            unsigned threads_z, unsigned shared, void *stream, void **arguments, void **extra);

typedef struct {
  LaunchKernel launch; /* cuLaunchKernel of the driver */
  void *reduce, *merge; /* the compiled kernels of triton_kernels.py */
  int64_t reduce_threads, reduce_shared, merge_threads, merge_shared; /* shared memory in bytes */
  int64_t tile, few_tiles, most_programs; /* as for _shares of fused_cuda.py */
} Plan;

/* Launch the kernels for the values at `data` on a device, without a sample, and return the status of the driver: 0, or
   a positive number if nothing was launched, or a negative one if only the first kernel was. All addresses are of the
   device. Triton appends one or two pointers to memory of its own, which these kernels do not use, to the arguments. */
int launch_statistics(const Plan *plan, void *stream, int64_t row, int64_t data, int64_t numel, double factor,
                      int64_t parts, int64_t counts) {
  int64_t tiles = (numel + plan->tile - 1) / plan->tile;
  int64_t each = tiles <= plan->few_tiles ? tiles : (tiles + plan->most_programs - 1) / plan->most_programs;
  int64_t share = each * plan->tile, sampled = -1, none = 0, bits;
  int32_t programs = (int32_t)((tiles + each - 1) / each), scaled = factor != 1.0;
  memcpy(&bits, &factor, sizeof bits);
  if (programs == 1) parts = counts = row;
  void *reduced[] = {&data, &numel, &share, &bits, &scaled, &row, &sampled, &parts, &counts, &row, &none, &none};
  int status = plan->launch(plan->reduce, (unsigned)programs, 1, 1, (unsigned)plan->reduce_threads, 1, 1,
                            (unsigned)plan->reduce_shared, stream, reduced, 0);
  if (status || programs == 1) return status;
  void *merged[] = {&parts, &counts, &programs, &numel, &sampled, &row, &none, &none};
  return -plan->launch(plan->merge, 1, 1, 1, (unsigned)plan->merge_threads, 1, 1, (unsigned)plan->merge_shared, stream,
                       merged, 0);
}
