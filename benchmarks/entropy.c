/* The floor of any JPEG loader: entropy decoding of a whole file, and nothing else. */
#include <setjmp.h>
#include <stdio.h>
#include <stdlib.h>

#include <jpeglib.h>

struct errors {
  struct jpeg_error_mgr base;
  jmp_buf jump;
};

static void on_error(j_common_ptr info) { longjmp(((struct errors *)info->err)->jump, 1); }

int entropy_only(const unsigned char *data, size_t length) {
  struct jpeg_decompress_struct info;
  struct errors errors;
  info.err = jpeg_std_error(&errors.base);
  errors.base.error_exit = on_error;
  unsigned char *row = NULL;
  if (setjmp(errors.jump)) {
    jpeg_destroy_decompress(&info);
    free(row);
    return 1;
  }
  jpeg_create_decompress(&info);
  jpeg_mem_src(&info, data, (unsigned long)length);
  jpeg_read_header(&info, TRUE);
  info.do_fancy_upsampling = FALSE;
  jpeg_start_decompress(&info);
  row = malloc((size_t)info.output_width * 3);
  /* Skipping to the very end would skip the decoding too: one last row is read. */
  if (info.output_height > 1) jpeg_skip_scanlines(&info, info.output_height - 1);
  jpeg_read_scanlines(&info, &row, 1);
  jpeg_abort_decompress(&info);
  jpeg_destroy_decompress(&info);
  free(row);
  return 0;
}
