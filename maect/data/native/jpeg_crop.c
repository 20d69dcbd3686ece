/* Crops of a JPEG, resized: decodes no more rows and columns than the crops need and resamples
 * with the integer arithmetic of Pillow's bicubic filter, so that the pixels are Pillow's.
 *
 * One call makes all views of one image from one decode, or those of many images that are decoded
 * already. No global state; a workspace belongs to one thread at a time. Whatever libjpeg only warns
 * about is refused: the caller has a referee.
 */
#include <math.h>
#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jpeglib.h>

#ifndef JCS_EXTENSIONS
#error "libjpeg-turbo is needed: this jpeglib.h is another libjpeg's"
#endif

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "pixels are taken apart and put together as little-endian words"
#endif

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

enum { OK = 0, UNREADABLE = 1, UNSUPPORTED = 2, BAD_GEOMETRY = 3, NO_MEMORY = 4 };

/* Pillow: 8 bits of pixel, 2 of headroom for the filter's negative lobes, the rest precision. */
#define PRECISION 22
#define LANES 8                 /* int32 lanes handled at once */
#define HALF (1 << (PRECISION - 1))
#define CHANNELS 3
#define ROWS LANES              /* source rows resampled together */
#define VECTORS 4               /* as many as an int32 has bytes */
#define BLOCK (VECTORS * LANES) /* pixels of a row handled at once */
#define MAX_SIDE (1 << 24)      /* of the resized box */
#define MAX_OUT 4096            /* side of the output */
#define MAX_PIXELS (1 << 26)
#define MAX_VIEWS 64

typedef int32_t lanes_t __attribute__((vector_size(4 * LANES)));

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (lanes_t){__VA_ARGS__})
#endif

/* The hot loops are compiled once more for wider vectors; the loader picks at run time. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__has_attribute) && !defined(PLAIN)
#if __has_attribute(target_clones)
#define WIDE __attribute__((target_clones("avx2", "default")))
#endif
#endif
#ifndef WIDE
#define WIDE
#endif

typedef struct {
  void *start;
  size_t size;
} buffer_t;

typedef struct {
  buffer_t pixels, strip, ring, weights[2], bounds[2];
} workspace_t;

/* Where `n` outputs read: from[i] is the first source pixel, count[i] how many. */
typedef struct {
  int taps;
  const int32_t *from, *count, *weight; /* weight[i * taps + j] */
} filter_t;

typedef struct {
  int x, y, w, h, full_w, full_h, left, top;
} geometry_t;

typedef struct {
  struct jpeg_error_mgr base;
  jmp_buf jump;
} errors_t;

static void *reserve(buffer_t *buffer, size_t size) {
  if (buffer->size < size) {
    size_t rounded = (size + 4095) / 4096 * 4096;
    free(buffer->start);
    buffer->start = aligned_alloc(64, rounded);
    buffer->size = buffer->start ? rounded : 0;
  }
  return buffer->start;
}

workspace_t *maect_workspace_new(void) { return calloc(1, sizeof(workspace_t)); }

void maect_workspace_free(workspace_t *space) {
  if (!space) return;
  free(space->pixels.start);
  free(space->strip.start);
  free(space->ring.start);
  for (int i = 0; i < 2; i++) {
    free(space->weights[i].start);
    free(space->bounds[i].start);
  }
  free(space);
}

const char *maect_version(void) { return TEXT(LIBJPEG_TURBO_VERSION); }

const char *maect_source(void) {
#ifdef SOURCE
  return TEXT(SOURCE);
#else
  return "";
#endif
}

/* ---- resampling ---- */

static double bicubic(double x) { /* a = -0.5 */
  x = fabs(x);
  if (x < 1.0) return (1.5 * x - 2.5) * x * x + 1.0;
  if (x < 2.0) return (((x - 5.0) * x + 8.0) * x - 4.0) * -0.5;
  return 0.0;
}

/* Weights of outputs [first, first + n) when `in` pixels become `out`. */
static int make_filter(workspace_t *space, int axis, int in, int out, int first, int n,
                       filter_t *filter) {
  double scale = (double)in / out, stretch = scale < 1.0 ? 1.0 : scale;
  double support = 2.0 * stretch, inverse = 1.0 / stretch;
  int taps = (int)ceil(support) * 2 + 1;
  int32_t *bounds = reserve(&space->bounds[axis], (size_t)n * 2 * sizeof(int32_t));
  /* The doubles of one output are kept behind the integers of all. */
  size_t integers = ((size_t)n * taps * sizeof(int32_t) + 15) / 16 * 16;
  int32_t *weight = reserve(&space->weights[axis], integers + (size_t)taps * sizeof(double));
  if (!bounds || !weight) return NO_MEMORY;
  double *exact = (double *)((char *)weight + integers);
  for (int i = 0; i < n; i++) {
    double center = (first + i + 0.5) * scale, total = 0.0;
    int from = (int)(center - support + 0.5), to = (int)(center + support + 0.5);
    if (from < 0) from = 0;
    if (to > in) to = in;
    int count = to - from;
    for (int j = 0; j < count; j++) total += exact[j] = bicubic((j + from - center + 0.5) * inverse);
    for (int j = 0; j < count; j++) {
      double value = exact[j] / total * (1 << PRECISION);
      weight[(size_t)i * taps + j] = (int32_t)(value < 0 ? value - 0.5 : value + 0.5);
    }
    bounds[i] = from;
    bounds[n + i] = count;
  }
  *filter = (filter_t){taps, bounds, bounds + n, weight};
  return OK;
}

/* Sums to pixel values; by address, as wide vectors have no calling convention of old. */
static inline void to_pixels(lanes_t *sum) {
  lanes_t value = *sum >> PRECISION;
  value &= ~(value < 0);
  lanes_t over = value > 255;
  *sum = (value & ~over) | (over & 255);
}

/* Rows to columns. */
static inline void transpose(lanes_t v[LANES]) {
  lanes_t a[LANES], b[LANES];
  for (int i = 0; i < 8; i += 2) {
    a[i] = SHUFFLE(v[i], v[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    a[i + 1] = SHUFFLE(v[i], v[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int i = 0; i < 8; i += 4)
    for (int j = 0; j < 2; j++) {
      b[i + 2 * j] = SHUFFLE(a[i + j], a[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
      b[i + 2 * j + 1] = SHUFFLE(a[i + j], a[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 4; i++) {
    v[i] = SHUFFLE(b[i], b[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    v[i + 4] = SHUFFLE(b[i], b[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
  }
}

/* ROWS rows of RGBX bytes to vectors of one channel of one pixel of all rows. */
WIDE static void to_strip(const uint8_t *const source[ROWS], int width, lanes_t *strip) {
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
    for (int i = 0; i < LANES; i++, strip += CHANNELS)
      for (int c = 0; c < CHANNELS; c++) strip[c] = pixels[i] >> (8 * c) & 255;
  }
}

/* A strip to ROWS rows of n pixels: target[row * pitch + channel * plane + pixel]. The pixels of a
 * block stand in the order 0 4 8 ... 1 5 9 ...: so four vectors of them are packed to bytes in order
 * by shifts alone. */
WIDE static void resample_rows(const lanes_t *strip, const filter_t *filter, int n, int first_column,
                               int32_t *target, size_t plane, size_t pitch) {
  lanes_t block[CHANNELS][VECTORS][LANES];
  memset(block, 0, sizeof block);
  for (int i = 0; i < n; i++) {
    const int32_t *weight = filter->weight + (size_t)i * filter->taps;
    const lanes_t *source = strip + (size_t)(filter->from[i] - first_column) * CHANNELS;
    lanes_t sum[CHANNELS];
    for (int c = 0; c < CHANNELS; c++) sum[c] = (lanes_t){0} + HALF;
    for (int j = 0; j < filter->count[i]; j++, source += CHANNELS)
      for (int c = 0; c < CHANNELS; c++) sum[c] += source[c] * weight[j];
    for (int c = 0; c < CHANNELS; c++) {
      to_pixels(&sum[c]);
      block[c][i % VECTORS][i % BLOCK / VECTORS] = sum[c];
    }
    if (i % BLOCK < BLOCK - 1 && i < n - 1) continue;
    int32_t *corner = target + i / BLOCK * BLOCK;
    for (int c = 0; c < CHANNELS; c++)
      for (int k = 0; k < VECTORS; k++) {
        transpose(block[c][k]);
        for (int r = 0; r < ROWS; r++)
          memcpy(corner + r * pitch + c * plane + k * LANES, &block[c][k][r], sizeof(lanes_t));
      }
  }
}

/* Rows of a ring of so many slots, from `slot` on, to one row of n bytes. */
WIDE static void resample_column(const int32_t *ring, size_t pitch, int slots, int slot,
                                 const int32_t *weight, int count, size_t n, uint8_t *target) {
  for (size_t x = 0; x < n; x += BLOCK) {
    lanes_t sum[VECTORS];
    for (int k = 0; k < VECTORS; k++) sum[k] = (lanes_t){0} + HALF;
    for (int j = 0, row = slot; j < count; j++) {
      const int32_t *source = ring + (size_t)row * pitch + x;
      for (int k = 0; k < VECTORS; k++) {
        lanes_t values;
        memcpy(&values, source + k * LANES, sizeof values);
        sum[k] += values * weight[j];
      }
      if (++row == slots) row = 0;
    }
    lanes_t bytes = {0};
    for (int k = 0; k < VECTORS; k++) {
      to_pixels(&sum[k]);
      bytes |= sum[k] << (8 * k);
    }
    if (n - x >= BLOCK)
      memcpy(target + x, &bytes, BLOCK);
    else
      memcpy(target + x, &bytes, n - x);
  }
}

/* Source pixels [begin, end) of an axis that outputs [first, first + n) read. */
static void needed(int in, int out, int first, int n, int *begin, int *end) {
  double scale = (double)in / out, support = 2.0 * (scale < 1.0 ? 1.0 : scale);
  int from = (int)((first + 0.5) * scale - support + 0.5);
  int to = (int)((first + n - 0.5) * scale + support + 0.5);
  *begin = from < 0 ? 0 : from;
  *end = to > in ? in : to;
}

/* One view. `pixels` holds RGBX rows of the image from (origin_x, origin_y) on. */
static int make_view(workspace_t *space, const uint8_t *pixels, size_t pitch, int origin_x,
                     int origin_y, const geometry_t *g, int size, uint8_t *out) {
  int x0, x1, y0, y1;
  needed(g->w, g->full_w, g->left, size, &x0, &x1);
  needed(g->h, g->full_h, g->top, size, &y0, &y1);
  filter_t across, down;
  int status = make_filter(space, 0, g->w, g->full_w, g->left, size, &across);
  if (!status) status = make_filter(space, 1, g->h, g->full_h, g->top, size, &down);
  if (status) return status;
  int width = x1 - x0, height = y1 - y0;
  /* A row of the ring is three planes, each a whole number of blocks. */
  size_t plane = ((size_t)size + BLOCK - 1) / BLOCK * BLOCK, pitch_out = CHANNELS * plane;
  int slots = ((down.taps < height ? down.taps : height) + 2 * ROWS) / ROWS * ROWS;
  int32_t *ring = reserve(&space->ring, pitch_out * (size_t)slots * sizeof(int32_t));
  size_t columns = ((size_t)width + LANES - 1) / LANES * LANES;
  lanes_t *strip = reserve(&space->strip, columns * CHANNELS * sizeof(lanes_t));
  if (!ring || !strip) return NO_MEMORY;
  if (plane > (size_t)size) memset(ring, 0, pitch_out * (size_t)slots * sizeof(int32_t));
  const uint8_t *corner =
      pixels + (size_t)(g->y + y0 - origin_y) * pitch + (size_t)(g->x + x0 - origin_x) * 4;
  for (int y = 0, done = 0; done < size; y += ROWS) {
    const uint8_t *source[ROWS];
    for (int r = 0; r < ROWS; r++)
      source[r] = corner + (size_t)(y + r < height ? y + r : height - 1) * pitch;
    to_strip(source, width, strip);
    resample_rows(strip, &across, size, x0, ring + (size_t)(y % slots) * pitch_out, plane,
                  pitch_out);
    int ready = done; /* output rows whose last source row is in the ring */
    while (ready < size && down.from[ready] - y0 + down.count[ready] <= y + ROWS) ready++;
    /* Channel by channel, so that a third of the ring is in use at a time. */
    for (int c = 0; c < CHANNELS; c++)
      for (int i = done; i < ready; i++)
        resample_column(ring + c * plane, pitch_out, slots, (down.from[i] - y0) % slots,
                        down.weight + (size_t)i * down.taps, down.count[i], (size_t)size,
                        out + ((size_t)c * size + i) * size);
    done = ready;
  }
  return OK;
}

/* ---- decoding ---- */

static void on_error(j_common_ptr info) { longjmp(((errors_t *)info->err)->jump, 1); }

static void on_message(j_common_ptr info, int level) {
  if (level < 0) on_error(info); /* a warning: corrupt data that libjpeg would paper over */
}

static int valid(const geometry_t *g, int width, int height, int size) {
  return g->x >= 0 && g->y >= 0 && g->w > 0 && g->h > 0 && g->w <= width - g->x &&
         g->h <= height - g->y && g->full_w > 0 && g->full_h > 0 && g->full_w <= MAX_SIDE &&
         g->full_h <= MAX_SIDE && g->left >= 0 && g->top >= 0 && size <= g->full_w - g->left &&
         size <= g->full_h - g->top;
}

/* Sub-sampling for which libjpeg-turbo decodes part of the rows and columns exactly. */
static int ordinary(const struct jpeg_decompress_struct *info) {
  if (info->num_components == 1) return info->jpeg_color_space == JCS_GRAYSCALE;
  if (info->num_components != 3) return 0;
  if (info->jpeg_color_space != JCS_YCbCr && info->jpeg_color_space != JCS_RGB) return 0;
  const jpeg_component_info *c = info->comp_info;
  for (int i = 1; i < 3; i++)
    if (c[i].h_samp_factor != 1 || c[i].v_samp_factor != 1) return 0;
  return c[0].h_samp_factor <= 2 && c[0].v_samp_factor <= 2;
}

/* Decode rows [y0, y1) and at least columns [*x0, x1) as RGBX; *x0 becomes the first column. */
static int decode(workspace_t *space, struct jpeg_decompress_struct *info, int *x0, int x1, int y0,
                  int y1, size_t *pitch) {
  /* Smooth upsampling of narrower chroma looks one block to the side. */
  int margin = info->max_h_samp_factor > 1 ? info->max_h_samp_factor * DCTSIZE : 0;
  int left = *x0 > margin ? *x0 - margin : 0;
  int right = (int)info->output_width - x1 > margin ? x1 + margin : (int)info->output_width;
  JDIMENSION offset = (JDIMENSION)left, width = (JDIMENSION)(right - left);
  if (width < info->output_width) jpeg_crop_scanline(info, &offset, &width);
  if ((int)offset > *x0 || offset + info->output_width < (JDIMENSION)x1) return UNSUPPORTED;
  size_t height = (size_t)(y1 - y0);
  *pitch = (size_t)info->output_width * 4;
  if (height * info->output_width > MAX_PIXELS) return UNSUPPORTED;
  uint8_t *pixels = reserve(&space->pixels, height * *pitch);
  if (!pixels) return NO_MEMORY;
  if (y0 > 0 && jpeg_skip_scanlines(info, (JDIMENSION)y0) != (JDIMENSION)y0) return UNREADABLE;
  for (size_t done = 0; done < height;) {
    JSAMPROW rows[ROWS];
    size_t now = height - done < ROWS ? height - done : ROWS;
    for (size_t r = 0; r < now; r++) rows[r] = pixels + (done + r) * *pitch;
    JDIMENSION got = jpeg_read_scanlines(info, rows, (JDIMENSION)now);
    if (got == 0) return UNREADABLE;
    done += got;
  }
  *x0 = (int)offset;
  return OK;
}

/* Everything between creating and destroying the decompressor. */
static int render(workspace_t *space, struct jpeg_decompress_struct *info, const uint8_t *data,
                  size_t length, const geometry_t *views, int n, int size, uint8_t *out,
                  ptrdiff_t stride) {
  jpeg_mem_src(info, data, (unsigned long)length);
  if (jpeg_read_header(info, TRUE) != JPEG_HEADER_OK) return UNREADABLE;
  if (info->data_precision != 8 || jpeg_has_multiple_scans(info) || !ordinary(info))
    return UNSUPPORTED;
  int width = (int)info->image_width, height = (int)info->image_height;
  int x0 = width, y0 = height, x1 = 0, y1 = 0;
  for (int i = 0; i < n; i++) {
    if (!valid(&views[i], width, height, size)) return BAD_GEOMETRY;
    int a, b, c, d;
    needed(views[i].w, views[i].full_w, views[i].left, size, &a, &b);
    needed(views[i].h, views[i].full_h, views[i].top, size, &c, &d);
    if (views[i].x + a < x0) x0 = views[i].x + a;
    if (views[i].x + b > x1) x1 = views[i].x + b;
    if (views[i].y + c < y0) y0 = views[i].y + c;
    if (views[i].y + d > y1) y1 = views[i].y + d;
  }
  if (x0 >= x1 || y0 >= y1) return BAD_GEOMETRY;
  info->out_color_space = JCS_EXT_RGBX;
  info->dct_method = JDCT_ISLOW;
  info->do_fancy_upsampling = TRUE;
  if (!jpeg_start_decompress(info)) return UNREADABLE;
  size_t pitch = 0;
  int status = decode(space, info, &x0, x1, y0, y1, &pitch);
  for (int i = 0; i < n && status == OK; i++)
    status = make_view(space, space->pixels.start, pitch, x0, y0, &views[i], size, out + i * stride);
  return status;
}

/* All views of one JPEG.
 *
 * geometry: n times eight int32, as in maect/data/geometry.py.
 * out: view i goes to out + i * stride as three planes of size x size bytes.
 * Returns OK or why not; out is then undefined.
 */
int maect_render(workspace_t *space, const uint8_t *data, size_t length, const int32_t *geometry,
                 int n, int size, uint8_t *out, ptrdiff_t stride) {
  struct jpeg_decompress_struct info;
  errors_t errors;
  geometry_t views[MAX_VIEWS];
  if (n < 1 || n > MAX_VIEWS || size < 1 || size > MAX_OUT) return BAD_GEOMETRY;
  memcpy(views, geometry, (size_t)n * sizeof(geometry_t));
  memset(&info, 0, sizeof info);
  info.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = on_error;
  errors.base.emit_message = on_message;
  int status = UNREADABLE;
  /* Only `info` is read after a jump, and no local changes between here and there. */
  if (setjmp(errors.jump) == 0) {
    jpeg_create_decompress(&info);
    info.mem->max_memory_to_use = (long)MAX_PIXELS * 8;
    int result = render(space, &info, data, length, views, n, size, out, stride);
    jpeg_destroy_decompress(&info);
    return result;
  }
  jpeg_destroy_decompress(&info);
  return status;
}

/* All views of n images that are decoded already.
 *
 * images: image i begins at images + ids[i] * length, RGB, its rows `pitch` bytes apart.
 * sides: n times width and height.
 * geometry: n times `views` times eight int32.
 * out: view v of image i goes to out + v * view_stride + i * image_stride.
 * Returns OK or why not; out is then undefined.
 */
int maect_crops(workspace_t *space, const uint8_t *images, size_t length, size_t pitch,
                const int64_t *ids, const int32_t *sides, const int32_t *geometry, int n, int views,
                int size, uint8_t *out, ptrdiff_t view_stride, ptrdiff_t image_stride) {
  if (views < 1 || size < 1 || size > MAX_OUT) return BAD_GEOMETRY;
  for (int i = 0; i < n; i++, sides += 2) {
    int width = sides[0], height = sides[1];
    if (width < 1 || height < 1 || (size_t)width * height > MAX_PIXELS) return BAD_GEOMETRY;
    uint8_t *pixels = reserve(&space->pixels, (size_t)width * height * 4), *target = pixels;
    if (!pixels) return NO_MEMORY;
    const uint8_t *row = images + (size_t)ids[i] * length;
    for (int y = 0; y < height; y++, row += pitch)
      for (int x = 0; x < width; x++, target += 4) {
        memcpy(target, row + 3 * (size_t)x, 3);
        target[3] = 0;
      }
    for (int v = 0; v < views; v++, geometry += 8) {
      geometry_t view;
      memcpy(&view, geometry, sizeof view);
      if (!valid(&view, width, height, size)) return BAD_GEOMETRY;
      int status = make_view(space, pixels, (size_t)width * 4, 0, 0, &view, size,
                             out + v * view_stride + i * image_stride);
      if (status) return status;
    }
  }
  return OK;
}
