// Poolings in two dimensions with their gradients, float32 and bfloat16.
//
// nn.MaxPool2d and nn.AvgPool2d emit max_pool_2d and avg_pool_2d for channels first, and for
// channels last with return_indices or a dilation; else tf_max_pool_2d and tf_avg_pool_2d, whose
// averages leave the padding out, and whose maxima come without their index. OneFlow 0.9.0 has
// adaptive_avg_pool2d for (N, C, H, W) only.
#include <string>

#include "common/oneflow.h"
#include "pool/average.h"
#include "pool/maximum.h"

namespace oneflow_accel {

namespace {

// One axis of a sliding window. `padding_after` bounds PoolWindow::full only: the number of outputs
// is OneFlow's choice, and a window beyond the input is empty.
struct SlidingAxis {
  int64_t input;
  int64_t kernel;
  int64_t stride;
  int64_t padding_before;
  int64_t padding_after;
  int64_t dilation;

  PoolWindow operator()(int64_t i) const {
    const int64_t start = i * stride - padding_before;
    const int64_t stop = start + (kernel - 1) * dilation + 1;
    const int64_t full = std::min(stop, input + padding_after) - start;
    // The first position of the window that is not in the padding.
    const int64_t begin = start >= 0 ? start : start + round_up(-start, dilation);
    const int64_t end = std::min(stop, input);
    const bool empty = begin >= end;
    return {empty ? 0 : begin, empty ? 0 : end, dilation, full};
  }
};

// Output index i covers floor(i * in / out) up to ceil((i + 1) * in / out).
struct AdaptiveAxis {
  int64_t input;
  int64_t output;

  PoolWindow operator()(int64_t i) const {
    const int64_t begin = i * input / output;
    const int64_t end = ceil_div((i + 1) * input, output);
    return {begin, end, 1, end - begin};
  }
};

// axis(i, input, output) gives the windows of axis i, by the index of the output.
template <typename AxisOf>
PoolGeometry pool_geometry(Context* ctx, bool last, const AxisOf& axis) {
  const bool is_grad = ctx->has_output("dx", 0);
  const auto& x = shape_of(ctx, is_grad ? "dx" : "x");
  const auto& y = shape_of(ctx, is_grad ? "dy" : "y");
  const int height = last ? 1 : 2;
  const int width = height + 1;
  const auto windows = [&](int i) {
    const int64_t output = y.At(height + i);
    const auto window = axis(i, x.At(height + i), output);
    std::vector<PoolWindow> all;
    for (int64_t k = 0; k < output; ++k) { all.push_back(window(k)); }
    return all;
  };
  return {last, x.At(0), x.At(last ? 3 : 1), x.At(height), x.At(width), windows(0), windows(1)};
}

// Of any pooling, or gradient of one.
PoolGeometry geometry_of(Context* ctx) {
  const auto begins_with = [&op = ctx->op_type_name()](const char* prefix) {
    return op.find(prefix) == 0;
  };
  if (begins_with("adaptive")) {
    return pool_geometry(ctx, /*last=*/false, [](int, int64_t input, int64_t output) {
      return AdaptiveAxis{input, output};
    });
  }
  const bool last = ctx->Attr<std::string>("data_format") == "channels_last";
  const auto size = [&](const char* attribute, int axis) -> int64_t {
    return ctx->Attr<std::vector<int32_t>>(attribute).at(axis);
  };
  if (begins_with("tf")) {
    const auto& padding = ctx->Attr<std::string>("padding");
    return pool_geometry(ctx, last, [&](int i, int64_t input, int64_t output) {
      const int64_t kernel = size("pool_size", i);
      const int64_t stride = size("strides", i);
      const int64_t needed = std::max<int64_t>(0, (output - 1) * stride + kernel - input);
      const int64_t before = padding == "valid"        ? 0
                             : padding == "customized" ? size("padding_before", i)
                             : padding == "same_lower" ? needed - needed / 2
                                                       : needed / 2;  // "same_upper"
      return SlidingAxis{input, kernel, stride, before, 0, 1};
    });
  }
  const bool is_average = begins_with("avg");
  PoolGeometry geometry = pool_geometry(ctx, last, [&](int i, int64_t input, int64_t) {
    const int64_t padding = size("padding", i);
    return SlidingAxis{input, size("kernel_size", i), size("stride", i), padding, padding,
                       is_average ? 1 : size("dilation", i)};
  });
  if (is_average) {
    geometry.fixed_divisor = ctx->Attr<int32_t>("divisor_override");
    geometry.counts_padding = ctx->Attr<bool>("count_include_pad");
  }
  return geometry;
}

template <typename T>
void max_pool_kernel(Context* ctx) {
  max_pool(geometry_of(ctx), input<T>(ctx, "x"), output<T>(ctx, "y"),
           output_or_null<int64_t>(ctx, "indice"));
}

template <typename T>
void max_pool_grad_kernel(Context* ctx) {
  const PoolGeometry g = geometry_of(ctx);
  const T* dy = input<T>(ctx, "dy");
  if (ctx->has_input("indice", 0)) {
    max_pool_grad(g, dy, input<int64_t>(ctx, "indice"), output<T>(ctx, "dx"));
  } else {
    max_pool_grad_from_input(g, input<T>(ctx, "x"), dy, output<T>(ctx, "dx"));
  }
}

template <typename T>
void average_pool_kernel(Context* ctx) {
  average_pool(geometry_of(ctx), input<T>(ctx, "x"), output<T>(ctx, "y"));
}

template <typename T>
void average_pool_grad_kernel(Context* ctx) {
  average_pool_grad(geometry_of(ctx), input<T>(ctx, "dy"), output<T>(ctx, "dx"));
}

REGISTER_KERNELS(max_pool_kernel, "max_pool_2d tf_max_pool_2d", "x");
REGISTER_KERNELS(max_pool_grad_kernel, "max_pool_2d_grad tf_max_pool_2d_grad", "dx");
REGISTER_KERNELS(average_pool_kernel, "avg_pool_2d tf_avg_pool_2d adaptive_avg_pool2d", "x");
REGISTER_KERNELS(average_pool_grad_kernel,
                 "avg_pool_2d_grad tf_avg_pool_2d_grad adaptive_avg_pool2d_grad", "dx");

}  // namespace

}  // namespace oneflow_accel
