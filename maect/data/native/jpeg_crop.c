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
#define SPLIT 12                /* bits of a weight's lower half */
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

typedef struct {
  void *start;
  size_t size;
} buffer_t;

typedef struct {
  buffer_t pixels, strip, ring, weights[2], bounds[2];
} workspace_t;

/* Of two values: two weights in the halves of each word, low and, 2^SPLIT times as much, high. */
typedef struct {
  int32_t low, high;
} weight_t;

/* Where `n` outputs read: from[i] is the first pair of source pixels, count[i] how many. */
typedef struct {
  int taps;
  const int32_t *from, *count;
  const weight_t *weight; /* weight[i * taps + j] */
} filter_t;

typedef struct {
  void (*to_strip)(const uint8_t *const *, int, lanes_t *);
  void (*resample_rows)(const lanes_t *, const filter_t *, int, int32_t *, size_t, size_t);
  void (*resample_column)(const int32_t *, size_t, int, int, const weight_t *, int, size_t,
                          uint8_t *);
} kernels_t;

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

/* A weight of two halves; what a sum of products loses above 32 bits is the same either way. */
static int32_t halves(int32_t first, int32_t second) {
  return (int32_t)((uint32_t)(first & 0xffff) | (uint32_t)second << 16);
}

/* Weights of outputs [first, first + n) when `in` pixels become `out`; pixels count from `origin`. */
static int make_filter(workspace_t *space, int axis, int in, int out, int first, int n, int origin,
                       filter_t *filter) {
  double scale = (double)in / out, stretch = scale < 1.0 ? 1.0 : scale;
  double support = 2.0 * stretch, inverse = 1.0 / stretch;
  int most = (int)ceil(support) * 2 + 1, taps = (most + 2) / 2;
  int32_t *bounds = reserve(&space->bounds[axis], (size_t)n * 2 * sizeof(int32_t));
  /* The doubles of one output are kept behind the weights of all, and then its integers. */
  size_t weights = (size_t)n * taps * sizeof(weight_t);
  weight_t *weight = reserve(&space->weights[axis], weights + (size_t)most * sizeof(double) +
                                                        (size_t)(2 * taps) * sizeof(int32_t));
  if (!bounds || !weight) return NO_MEMORY;
  double *exact = (double *)((char *)weight + weights);
  int32_t *whole = (int32_t *)(exact + most);
  for (int i = 0; i < n; i++) {
    double center = (first + i + 0.5) * scale, total = 0.0;
    int from = (int)(center - support + 0.5), to = (int)(center + support + 0.5);
    if (from < 0) from = 0;
    if (to > in) to = in;
    int count = to - from, odd = (from - origin) & 1, pairs = (odd + count + 1) / 2;
    for (int j = 0; j < count; j++) total += exact[j] = bicubic((j + from - center + 0.5) * inverse);
    whole[0] = whole[2 * pairs - 1] = 0;
    for (int j = 0; j < count; j++) {
      double value = exact[j] / total * (1 << PRECISION);
      whole[odd + j] = (int32_t)(value < 0 ? value - 0.5 : value + 0.5);
    }
    for (int j = 0; j < pairs; j++) {
      int32_t low[2], high[2];
      for (int k = 0; k < 2; k++) {
        low[k] = (int32_t)((uint32_t)whole[2 * j + k] << (32 - SPLIT)) >> (32 - SPLIT);
        high[k] = (whole[2 * j + k] - low[k]) >> SPLIT;
      }
      weight[(size_t)i * taps + j] = (weight_t){halves(low[0], low[1]), halves(high[0], high[1])};
    }
    bounds[i] = (from - origin) / 2;
    bounds[n + i] = pairs;
  }
  *filter = (filter_t){taps, bounds, bounds + n, weight};
  return OK;
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

/* The weights of a pair. */
static inline int32_t first_of(const weight_t *w) {
  return (int16_t)w->low + (int16_t)w->high * (1 << SPLIT);
}

static inline int32_t second_of(const weight_t *w) {
  return (w->low >> 16) + (w->high >> 16) * (1 << SPLIT);
}

#define KERNEL(name) name
#define TARGET
#define PAIRED 0
#include "kernels.h"

#if defined(__x86_64__) && !defined(PLAIN)
#include <immintrin.h>

#define WIDE

#define KERNEL(name) name##_avx2
#define TARGET __attribute__((target("avx2")))
#define PAIRED 1
#include "kernels.h"
#endif

/* The fastest that this processor has. */
static const kernels_t *best(void) {
#ifdef WIDE
  if (__builtin_cpu_supports("avx2")) return &kernels_avx2;
#endif
  return &kernels;
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
  int status = make_filter(space, 0, g->w, g->full_w, g->left, size, x0, &across);
  if (!status) status = make_filter(space, 1, g->h, g->full_h, g->top, size, y0, &down);
  if (status) return status;
  int width = x1 - x0, height = y1 - y0;
  const kernels_t *run = best();
  /* A slot of the ring is a pair of rows of three planes, each a whole number of blocks. */
  size_t plane = ((size_t)size + BLOCK - 1) / BLOCK * BLOCK, pitch_out = CHANNELS * plane;
  int pairs = (height + 1) / 2;
  int slots = ((down.taps < pairs ? down.taps : pairs) + ROWS) / (ROWS / 2) * (ROWS / 2);
  int32_t *ring = reserve(&space->ring, pitch_out * (size_t)slots * sizeof(int32_t));
  size_t columns = ((size_t)width + LANES - 1) / LANES * LANES;
  lanes_t *strip = reserve(&space->strip, columns / 2 * CHANNELS * sizeof(lanes_t));
  if (!ring || !strip) return NO_MEMORY;
  if (plane > (size_t)size) memset(ring, 0, pitch_out * (size_t)slots * sizeof(int32_t));
  const uint8_t *corner =
      pixels + (size_t)(g->y + y0 - origin_y) * pitch + (size_t)(g->x + x0 - origin_x) * 4;
  for (int y = 0, done = 0; done < size; y += ROWS) {
    const uint8_t *source[ROWS];
    for (int r = 0; r < ROWS; r++)
      source[r] = corner + (size_t)(y + r < height ? y + r : height - 1) * pitch;
    run->to_strip(source, width, strip);
    run->resample_rows(strip, &across, size, ring + (size_t)(y / 2 % slots) * pitch_out, plane,
                       pitch_out);
    int ready = done; /* output rows whose last source row is in the ring */
    while (ready < size && 2 * (down.from[ready] + down.count[ready]) <= y + ROWS) ready++;
    /* Channel by channel, so that a third of the ring is in use at a time. */
    for (int c = 0; c < CHANNELS; c++)
      for (int i = done; i < ready; i++)
        run->resample_column(ring + c * plane, pitch_out, slots, down.from[i] % slots,
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

static int sizes_fit(const int32_t *sizes, int n) {
  for (int i = 0; i < n; i++)
    if (sizes[i] < 1 || sizes[i] > MAX_OUT) return 0;
  return 1;
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
                  size_t length, const geometry_t *views, int n, const int32_t *sizes,
                  uint8_t *const *out) {
  jpeg_mem_src(info, data, (unsigned long)length);
  if (jpeg_read_header(info, TRUE) != JPEG_HEADER_OK) return UNREADABLE;
  if (info->data_precision != 8 || jpeg_has_multiple_scans(info) || !ordinary(info))
    return UNSUPPORTED;
  int width = (int)info->image_width, height = (int)info->image_height;
  int x0 = width, y0 = height, x1 = 0, y1 = 0;
  for (int i = 0; i < n; i++) {
    if (!valid(&views[i], width, height, sizes[i])) return BAD_GEOMETRY;
    int a, b, c, d;
    needed(views[i].w, views[i].full_w, views[i].left, sizes[i], &a, &b);
    needed(views[i].h, views[i].full_h, views[i].top, sizes[i], &c, &d);
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
    status = make_view(space, space->pixels.start, pitch, x0, y0, &views[i], sizes[i], out[i]);
  return status;
}

/* All views of one JPEG.
 *
 * geometry: n times eight int32, as in maect/data/transforms.py.
 * out: view i goes to out[i] as three planes of sizes[i] x sizes[i] bytes.
 * Returns OK or why not; out is then undefined.
 */
int maect_render(workspace_t *space, const uint8_t *data, size_t length, const int32_t *geometry,
                 int n, const int32_t *sizes, uint8_t *const *out) {
  struct jpeg_decompress_struct info;
  errors_t errors;
  geometry_t views[MAX_VIEWS];
  if (n < 1 || n > MAX_VIEWS || !sizes_fit(sizes, n)) return BAD_GEOMETRY;
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
    int result = render(space, &info, data, length, views, n, sizes, out);
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
 * out: view v of image i goes to out[v] + i * strides[v], sizes[v] x sizes[v] pixels.
 * Returns OK or why not; out is then undefined.
 */
int maect_crops(workspace_t *space, const uint8_t *images, size_t length, size_t pitch,
                const int64_t *ids, const int32_t *sides, const int32_t *geometry, int n, int views,
                const int32_t *sizes, uint8_t *const *out, const int64_t *strides) {
  if (views < 1 || !sizes_fit(sizes, views)) return BAD_GEOMETRY;
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
      if (!valid(&view, width, height, sizes[v])) return BAD_GEOMETRY;
      int status = make_view(space, pixels, (size_t)width * 4, 0, 0, &view, sizes[v],
                             out[v] + i * (ptrdiff_t)strides[v]);
      if (status) return status;
    }
  }
  return OK;
}
