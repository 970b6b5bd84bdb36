/* SPDX-License-Identifier: Apache-2.0 */
/* SPDX-FileCopyrightText: The xpuruntime developers */
#ifndef XPURUNTIME_KERNEL_PLUGIN_H
#define XPURUNTIME_KERNEL_PLUGIN_H

/*
 * Kernels of third parties, in C: a shared library that exports one function, `xpuruntime_kernels`.
 *
 *     $ python -c "import xpuruntime.ops.plugins as p; print(p.include_folder())"
 *     $ c++ -shared -fPIC -O3 -I<that folder> -o my_kernels.so my_kernels.cpp
 *
 * A Python package names the library under the entry point group `xpuruntime.kernels`, or a program
 * calls `xpuruntime.ops.plugins.load_library(path)`. From then on the kernels take part like
 * built-in ones: policies name them, `auto` measures them, decisions list them.
 *
 * Everything here is plain C and grows only at the end of its structs; `size` says which fields
 * the other side knows, and what may become more is a pointer and a count. So a new operand, rank
 * or attribute moves no field, and a library goes on working with later versions of xpuruntime.
 * Functions are called from any thread, and may be called at the same time. No exception may leave
 * them. Text is UTF-8 and ends with a zero byte. Pointers in a description are valid during the
 * call only.
 *
 * Libraries that were built against version 1 of this header (fixed arrays, `float` attributes)
 * are loaded as before.
 */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/** The version that a library is built against; xpuruntime asks for it first, and then for 1. */
#define XPURUNTIME_KERNEL_ABI 2u

typedef enum XpuDeviceType { XPU_CPU = 0, XPU_CUDA = 1 } XpuDeviceType;

/** The operations; their operands, by place, are in the comments (inputs, then outputs). */
typedef enum XpuOp {
  XPU_MATMUL = 0,             /**< a, b, bias, scale_a, scale_b; out */
  XPU_ATTENTION = 1,          /**< q, k, v, mask, rng; out, lse */
  XPU_ATTENTION_BACKWARD = 2, /**< grad_out, q, k, v, out, lse, mask, rng; grad_q, grad_k, grad_v */
  XPU_LAYER_NORM = 3,         /**< x, residual, weight, bias; y, sum, mean, rstd */
  XPU_LAYER_NORM_BACKWARD = 4, /**< grad_y, x, weight, mean, rstd, grad_sum; grad_x, grad_weight,
                                    grad_bias */
  XPU_RMS_NORM = 5,            /**< as layer norm */
  XPU_RMS_NORM_BACKWARD = 6,   /**< as layer norm */
  XPU_CONV = 7,                /**< x, weight, bias; out */
  XPU_CONV_INPUT_GRADIENT = 8, /**< grad_out, weight; grad_x */
  XPU_CONV_WEIGHT_GRADIENT = 9 /**< grad_out, x; grad_weight */
} XpuOp;

/** Everything of an operand but its address. */
typedef struct XpuTensor {
  uint32_t size; /**< sizeof(XpuTensor) of xpuruntime */
  uint8_t code;  /**< DLPack's type code: 0 int, 1 uint, 2 float, 4 bfloat, 6 bool, 10 e4m3fn */
  uint8_t bits;
  uint16_t lanes;
  int32_t alignment; /**< of the address, in bytes, up to 256 */
  int32_t rank;
  const int64_t* shape;   /**< `rank` of them */
  const int64_t* strides; /**< `rank` of them, in elements */
} XpuTensor;

typedef struct XpuOpDescription {
  uint32_t size; /**< sizeof(XpuOpDescription) of xpuruntime */
  int32_t op;    /**< XpuOp */
  int32_t phase; /**< 0 infer, 1 train, 2 backward */
  int32_t device_type;
  int32_t device_index;
  int32_t compute_capability; /**< 90 for 9.0; 0 on the CPU */
  int32_t sm_count;           /**< 0 on the CPU */
  int32_t operand_count;
  const XpuTensor* const*
      operands; /**< `operand_count` of them; NULL where the call leaves one out */
  double scale;
  double epsilon;
  double dropout_p;
  int32_t activation; /**< 0 none, 1 relu, 2 gelu, 3 gelu_tanh, 4 silu */
  int32_t causal;     /**< 0 none, 1 top left, 2 bottom right */
  int32_t allow_tf32;
  int32_t deterministic;
  int32_t groups;
  int32_t spatial_rank;    /**< of a convolution: 2 for height and width; 0 for other operations */
  const int32_t* stride;   /**< `spatial_rank` of them */
  const int32_t* dilation; /**< `spatial_rank` of them */
  const int32_t* padding;  /**< 2 * `spatial_rank`: before each dimension, then behind each: top,
                              left, bottom, right */
} XpuOpDescription;

/** Where a function writes one sentence that users read, cut to `size` bytes. */
typedef struct XpuText {
  char* text;
  size_t size;
} XpuText;

typedef struct XpuKernel {
  uint32_t size;           /**< sizeof(XpuKernel), in each of them */
  const char* id;          /**< "backend.name"; the kernels of a library have one backend, which no
                                other has */
  int32_t op;              /**< XpuOp */
  int32_t device_type;     /**< XpuDeviceType */
  const char* description; /**< one line: what it is good for */
  const char* limits;      /**< one line: dtypes, shapes, devices */
  const char* version;     /**< of the library: measured times hold for one version */
  int32_t repeatable;      /**< 1: the same bits in every run */

  /**
   * 1: can do exactly this. 0: cannot; `reason` says why. Touches no device. Asked only for
   * operations of the kind `op` on devices of `device_type`.
   */
  int32_t (*supports)(const XpuOpDescription* op, XpuText reason);
  /**
   * Makes what `launch` needs, for this operation; slow. Returns NULL where it fails, and says why
   * in `error`; then another kernel may serve. `workspace` is the scratch memory in bytes that each
   * launch needs; 0 where it is not set.
   */
  void* (*prepare)(const XpuOpDescription* op, size_t* workspace, XpuText error);
  /**
   * Enqueues the work on `stream` (a cudaStream_t; NULL on the CPU, where it does the work). 0:
   * done; anything else is raised, with what `error` says. Neither allocates nor waits. `operands`
   * holds an address for each place, NULL where absent. `workspace` is aligned to 256 bytes, of
   * this launch alone, and holds anything; not to be used where none was asked for.
   */
  int32_t (*launch)(void* prepared, void* const* operands, void* workspace, void* stream,
                    XpuText error);
  /** Called once for what `prepare` or `prepare_config` returned. */
  void (*destroy)(void* prepared);

  /* Since version 2. All of these may be 0 or NULL. */

  int32_t explicit_only; /**< 1: `auto` never chooses it; it runs where it is asked for by name */
  uint32_t family_count;
  const char* const* families; /**< families of a policy, such as "flash_v2", that mean it too */
  /**
   * 1: the library behind the kernels can be used on this machine. 0: cannot; `reason` says what is
   * missing and what to install. The same function in all kernels of a library. NULL: always.
   */
  int32_t (*available)(XpuText reason);
  /**
   * 1: should be taken first where another kernel can serve too. 0: is known to be the slower one
   * for this; `reason` says why. Asked where `supports` says yes. NULL: 1.
   */
  int32_t (*favoured)(const XpuOpDescription* op, XpuText reason);
  /**
   * Writes configuration `index` (from 0, the first choice first) that is worth measuring into
   * `config`, and returns 1; 0 where there are no more. Letters, digits and "_.:=,+-". Comes with
   * `prepare_config`.
   */
  int32_t (*config)(const XpuOpDescription* op, uint32_t index, XpuText config);
  /**
   * `prepare` for one configuration: one that `config` gave, or that a policy or the tuning cache
   * names. Returns NULL where there is no such configuration. NULL: the kernel has none.
   */
  void* (*prepare_config)(const XpuOpDescription* op, const char* config, size_t* workspace,
                          XpuText error);
  /**
   * Writes the configuration that `prepare` chose, so that a policy can name it and
   * `prepare_config` do the same again. NULL: what `prepare` makes has no name.
   */
  void (*chosen_config)(const void* prepared, XpuText config);
} XpuKernel;

/**
 * What a library exports under the name `xpuruntime_kernels`: the kernels it has, valid for as long
 * as the process lives, and their number. Returns NULL where `abi` is not the version that it was
 * built against.
 */
typedef const XpuKernel* (*XpuKernels)(uint32_t abi, size_t* count);

#ifdef __cplusplus
}
#endif

#endif
