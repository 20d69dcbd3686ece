/* The hot loops of resampling, included once for each kind of vectors: KERNEL(name) names the
 * functions, TARGET says for which processors they are compiled, PAIRED whether products of pairs of
 * 16-bit integers are summed by one instruction there.
 *
 * A word holds two values of 8 bits that lie beside each other, one in each half: two pixels of a row,
 * or two rows. A weight of 24 bits would not fit half a word: it is two, 12 bits apart. */

/* sum += the values of a pair times their weights; `upper` collects what counts 2^SPLIT times. */
#if PAIRED
#define TIMES(pair, w) (lanes_t) _mm256_madd_epi16((__m256i)(pair), _mm256_set1_epi32(w))
#define ADD(sum, upper, pair, weight) \
  ((sum) += TIMES(pair, (weight)->low), (upper) += TIMES(pair, (weight)->high))
#else
#define ADD(sum, upper, pair, weight) \
  ((sum) += ((pair) & 0xffff) * first_of(weight) + ((pair) >> 16) * second_of(weight))
#endif

/* Sums to pixel values; by address, as wide vectors have no calling convention of old. */
TARGET static inline void KERNEL(to_pixels)(lanes_t *sum, const lanes_t *high) {
  lanes_t value = (*sum + (*high << SPLIT)) >> PRECISION;
#if PAIRED
  __m256i least = _mm256_max_epi32((__m256i)value, _mm256_setzero_si256());
  *sum = (lanes_t)_mm256_min_epi32(least, _mm256_set1_epi32(255));
#else
  value &= ~(value < 0);
  lanes_t over = value > 255;
  *sum = (value & ~over) | (over & 255);
#endif
}

/* ROWS rows of RGBX bytes to vectors of one channel of two pixels of all rows. */
TARGET static void KERNEL(to_strip)(const uint8_t *const source[ROWS], int width, lanes_t *strip) {
  for (int x = 0; x < width; x += LANES) {
    lanes_t pixels[LANES];
    int n = width - x < LANES ? width - x : LANES;
    for (int r = 0; r < ROWS; r++) {
      pixels[r] = (lanes_t){0};
      if (n == LANES)
        memcpy(&pixels[r], source[r] + 4 * (size_t)x, sizeof pixels[r]);
      else
        memcpy(&pixels[r], source[r] + 4 * (size_t)x, 4 * (size_t)n);
    }
    transpose(pixels);
    for (int i = 0; i < LANES; i += 2, strip += CHANNELS)
      for (int c = 0; c < CHANNELS; c++)
        strip[c] = (pixels[i] >> (8 * c) & 255) | (pixels[i + 1] >> (8 * c) & 255) << 16;
  }
}

/* A strip to ROWS rows of n pixels, in pairs: target[pair of rows * pitch + channel * plane + pixel].
 * The pixels of a block stand in the order 0 4 8 ... 1 5 9 ...: so four vectors of them are packed to
 * bytes in order by shifts alone. */
TARGET static void KERNEL(resample_rows)(const lanes_t *strip, const filter_t *filter, int n,
                                         int32_t *target, size_t plane, size_t pitch) {
  lanes_t block[CHANNELS][VECTORS][LANES];
  if (n % BLOCK) memset(block, 0, sizeof block);
  for (int i = 0; i < n; i++) {
    const weight_t *weight = filter->weight + (size_t)i * filter->taps;
    const lanes_t *source = strip + (size_t)filter->from[i] * CHANNELS;
    lanes_t sum[CHANNELS], high[CHANNELS];
    for (int c = 0; c < CHANNELS; c++) sum[c] = (lanes_t){0} + HALF, high[c] = (lanes_t){0};
    for (int j = 0; j < filter->count[i]; j++, source += CHANNELS)
      for (int c = 0; c < CHANNELS; c++) ADD(sum[c], high[c], source[c], weight + j);
    for (int c = 0; c < CHANNELS; c++) {
      KERNEL(to_pixels)(&sum[c], &high[c]);
      block[c][i % VECTORS][i % BLOCK / VECTORS] = sum[c];
    }
    if (i % BLOCK < BLOCK - 1 && i < n - 1) continue;
    int32_t *corner = target + i / BLOCK * BLOCK;
    for (int c = 0; c < CHANNELS; c++)
      for (int k = 0; k < VECTORS; k++) {
        lanes_t *rows = block[c][k];
        transpose(rows);
        for (int r = 0; r < ROWS; r += 2) {
          lanes_t pair = rows[r] | rows[r + 1] << 16;
          memcpy(corner + r / 2 * pitch + c * plane + k * LANES, &pair, sizeof pair);
        }
      }
  }
}

/* Pairs of rows of a ring of so many slots, from `slot` on, to one row of n bytes. */
TARGET static void KERNEL(resample_column)(const int32_t *ring, size_t pitch, int slots, int slot,
                                           const weight_t *weight, int count, size_t n,
                                           uint8_t *target) {
  for (size_t x = 0; x < n; x += BLOCK) {
    lanes_t sum[VECTORS], high[VECTORS];
    for (int k = 0; k < VECTORS; k++) sum[k] = (lanes_t){0} + HALF, high[k] = (lanes_t){0};
    for (int j = 0, row = slot; j < count; j++) {
      const int32_t *source = ring + (size_t)row * pitch + x;
      for (int k = 0; k < VECTORS; k++) {
        lanes_t values;
        memcpy(&values, source + k * LANES, sizeof values);
        ADD(sum[k], high[k], values, weight + j);
      }
      if (++row == slots) row = 0;
    }
    lanes_t bytes = {0};
    for (int k = 0; k < VECTORS; k++) {
      KERNEL(to_pixels)(&sum[k], &high[k]);
      bytes |= sum[k] << (8 * k);
    }
    if (n - x >= BLOCK)
      memcpy(target + x, &bytes, BLOCK);
    else
      memcpy(target + x, &bytes, n - x);
  }
}

static const kernels_t KERNEL(kernels) = {KERNEL(to_strip), KERNEL(resample_rows),
                                          KERNEL(resample_column)};

#undef ADD
#undef TIMES
#undef PAIRED
#undef KERNEL
#undef TARGET
