/* Feeds damaged JPEGs and absurd crops to the native decoder; the sanitizers are the judges.
 *
 * usage: fuzz_jpeg COUNT SEED FILE...
 * Prints how many inputs gave which status. Inputs and outputs lie in blocks of exactly their
 * size, so that one byte too far is seen.
 */
#include <limits.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct workspace workspace_t;
workspace_t *maect_workspace_new(void);
void maect_workspace_free(workspace_t *);
int maect_render(workspace_t *, const uint8_t *, size_t, const int32_t *, int, const int32_t *,
                 uint8_t *const *);

static uint64_t state;

static uint64_t next(void) { /* SplitMix64 */
  uint64_t z = (state += 0x9E3779B97F4A7C15u);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

static uint64_t below(uint64_t n) { return n ? next() % n : 0; }

typedef struct {
  uint8_t *data;
  size_t size;
} blob_t;

static blob_t read_file(const char *path) {
  FILE *file = fopen(path, "rb");
  if (!file) {
    perror(path);
    exit(2);
  }
  blob_t blob = {malloc(1 << 20), 0};
  blob.size = fread(blob.data, 1, 1 << 20, file);
  fclose(file);
  return blob;
}

/* Width and height as the frame header says, however damaged. */
static void frame(const uint8_t *data, size_t size, int *width, int *height) {
  *width = *height = 64;
  for (size_t i = 0; i + 9 < size; i++)
    if (data[i] == 0xFF && data[i + 1] >= 0xC0 && data[i + 1] <= 0xC2) {
      *height = data[i + 5] << 8 | data[i + 6];
      *width = data[i + 7] << 8 | data[i + 8];
      return;
    }
}

static size_t mutate(uint8_t *data, size_t size, size_t room, const blob_t *other) {
  for (uint64_t times = 1 + below(next() & 1 ? 2 : 6); times && size > 4; times--) {
    /* Headers decide more than coefficients: half of the damage goes there. */
    size_t at = below(next() & 1 ? size : size < 700 ? size : 700);
    size_t length = 1 + below(size - at < 64 ? size - at : 64);
    switch (below(8)) {
      case 0: data[at] ^= (uint8_t)(1u << below(8)); break;
      case 1: data[at] = (uint8_t)next(); break;
      case 2: data[at] = (next() & 1) ? 0xFF : 0; break;
      case 3: size = at; break;
      case 4: memmove(data + at, data + at + length, size - at - length); size -= length; break;
      case 5:
        if (size + length <= room) {
          memmove(data + at + length, data + at, size - at);
          size += length;
        }
        break;
      case 6: { /* a piece of another file */
        size_t from = below(other->size), n = 1 + below(400);
        if (n > other->size - from) n = other->size - from;
        if (n > size - at) n = size - at;
        memcpy(data + at, other->data + from, n);
        break;
      }
      default: /* a marker out of place */
        data[at] = 0xFF;
        if (at + 1 < size) data[at + 1] = (uint8_t)(0xC0 + below(64));
    }
  }
  return size;
}

static int32_t absurd(int side) {
  const int32_t values[] = {0, 1, -1, INT_MAX, INT_MIN, 1 << 24, (1 << 24) + 1, side, side + 1};
  return next() & 3 ? (int32_t)below((uint64_t)side + 2) : values[below(9)];
}

static void make_geometry(int32_t *g, int width, int height, int size) {
  if (below(3)) { /* a valid one, so that most calls get far */
    g[0] = (int32_t)below((uint64_t)width);
    g[1] = (int32_t)below((uint64_t)height);
    g[2] = 1 + (int32_t)below((uint64_t)(width - g[0]));
    g[3] = 1 + (int32_t)below((uint64_t)(height - g[1]));
    g[4] = size + (int32_t)below(next() & 7 ? 40 : 1 << 20);
    g[5] = size + (int32_t)below(next() & 7 ? 40 : 1 << 20);
    g[6] = (int32_t)below((uint64_t)(g[4] - size + 1));
    g[7] = (int32_t)below((uint64_t)(g[5] - size + 1));
  } else {
    for (int i = 0; i < 8; i++) g[i] = absurd(i % 2 ? height : width);
  }
}

int main(int argc, char **argv) {
  if (argc < 4) return 2;
  long count = atol(argv[1]), seen[8] = {0};
  state = strtoull(argv[2], NULL, 10);
  int files = argc - 3;
  blob_t *seeds = malloc((size_t)files * sizeof *seeds);
  for (int i = 0; i < files; i++) seeds[i] = read_file(argv[3 + i]);
  workspace_t *space = maect_workspace_new();
  for (long i = 0; i < count; i++) {
    if (i % 1000 == 999) { /* fresh buffers, so that their first sizes vary */
      maect_workspace_free(space);
      space = maect_workspace_new();
    }
    const blob_t *seed = &seeds[below((uint64_t)files)];
    size_t room = seed->size + 512;
    uint8_t *draft = malloc(room);
    memcpy(draft, seed->data, seed->size);
    size_t size = seed->size;
    if (below(4) > 1) size = mutate(draft, size, room, &seeds[below((uint64_t)files)]);
    uint8_t *data = malloc(size ? size : 1);
    memcpy(data, draft, size);
    free(draft);
    int width, height;
    frame(data, size, &width, &height);
    if (!width) width = 1;
    if (!height) height = 1;
    int n = 1 + (int)below(3);
    int32_t *geometry = malloc((size_t)n * 8 * sizeof *geometry), sides[3];
    uint8_t *out[3];
    for (int v = 0; v < n; v++) {
      sides[v] = 1 + (int)below(next() & 3 ? 24 : 70);
      make_geometry(geometry + 8 * v, width, height, sides[v]);
      out[v] = malloc((size_t)sides[v] * (size_t)sides[v] * 3);
    }
    int status = maect_render(space, data, size, geometry, n, sides, out);
    seen[status & 7]++;
    for (int v = 0; v < n; v++) free(out[v]);
    free(geometry);
    free(data);
  }
  maect_workspace_free(space);
  for (int i = 0; i < files; i++) free(seeds[i].data);
  free(seeds);
  printf("inputs %ld: made %ld, unreadable %ld, unsupported %ld, bad geometry %ld, no memory %ld\n",
         count, seen[0], seen[1], seen[2], seen[3], seen[4]);
  return 0;
}
