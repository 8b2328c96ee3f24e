// Softmax over the last axis with what LiBai's fused operators do before and after it, and their
// gradients, float32 and bfloat16:
//   fused_scale_mask_softmax: of x * scale where a mask is true and of a fill value where it is
//     false, the mask being broadcast to x;
//   fused_scale_mask_softmax_dropout, fused_bias_add_scale_mask_softmax_dropout: of x or x + bias,
//     which is broadcast too, and dropout with a given mask;
//   fused_tril_scale_softmax_mask_scale: the mask is causal: in each matrix of the last two axes,
//     row i sees the columns up to i + diagonal; and dropout.
#include <algorithm>
#include <stdexcept>

#include "common/oneflow.h"
#include "elementwise/broadcast.h"
#include "random/keep.h"
#include "softmax/row.h"
#include "softmax/row_set.h"

namespace oneflow_accel {

namespace {

// An element of softmax is some ten operations.
constexpr int64_t kSoftmaxOperations = 8;

// a where the condition holds, else b: by their bits, as GCC moves what makes `a` into a branch,
// which becomes no vector code.
ONEFLOW_ACCEL_INLINE float choose(bool condition, float a, float b) {
  const uint32_t all = 0U - static_cast<uint32_t>(condition);
  return __builtin_bit_cast(float, (__builtin_bit_cast(uint32_t, a) & all)
                                       | (__builtin_bit_cast(uint32_t, b) & ~all));
}

// The rows of an argument that is broadcast to the shape of another one.
class BroadcastRows {
 public:
  // Throws where `part_name` cannot be broadcast to `whole_name`: OneFlow's operators compare the
  // last axes only, and a kernel that went on would read beyond the mask.
  BroadcastRows(Context* ctx, const char* whole_name, const char* part_name)
      : BroadcastRows(shape_of(ctx, whole_name), shape_of(ctx, part_name)) {}

  // Where the values of a row that starts at `first` in the whole start in the part.
  int64_t offset(int64_t first) const {
    int64_t offset = 0;
    broadcast_.for_blocks(first, first + 1, [&](int64_t, int64_t, int64_t in_part, const Rows&) {
      offset = in_part;
    });
    return offset;
  }

  // Whether a row has one value for all its elements.
  bool single_value() const { return single_value_; }

 private:
  BroadcastRows(const ::oneflow::ShapeView& whole, const ::oneflow::ShapeView& part)
      : broadcast_(whole, part) {
    const int64_t axes = part.NumAxes();
    const int64_t missing = whole.NumAxes() - axes;
    bool fits = missing >= 0;
    for (int64_t axis = 0; fits && axis < axes; ++axis) {
      fits = part.At(axis) == 1 || part.At(axis) == whole.At(missing + axis);
    }
    if (!fits) {
      throw std::invalid_argument("a mask or bias of shape " + part.ToString()
                                  + " cannot be broadcast to " + whole.ToString());
    }
    single_value_ = axes == 0 || part.At(axes - 1) == 1;
  }

  Broadcast broadcast_;
  bool single_value_;
};

// Dropout with a given mask, if there is one.
struct Dropout {
  const char* softmax_name = "y";
  const uint8_t* mask = nullptr;
  float scale = 1.0F;

  Dropout(Context* ctx, const char* name, const char* scale_name) {
    if (!ctx->has_input(name, 0)) { return; }
    softmax_name = "softmax_y";
    mask = random::mask_bytes(ctx, name);
    scale = ctx->Attr<float>(scale_name);
  }

  // y = softmax of the row z(i), i < n, that starts at `first`, and what dropout leaves of it.
  template <typename T, typename Load>
  ONEFLOW_ACCEL_INLINE void softmax(int64_t first, int64_t n, const Load& z, T* softmax_y,
                                    T* y) const {
    T* to = softmax_y + first;
    if (mask == nullptr) { return row::softmax(n, z, row::rounded_to(to)); }
    const uint8_t* keep = mask + first;
    const float factor = scale;
    T* left = y + first;
    row::softmax(n, z, [=](int64_t i, float value) {
      to[i] = from_float<T>(value);
      left[i] = from_float<T>(value * random::kept(keep[i], factor));
    });
  }

  // Calls store(i, the gradient by z).
  template <typename T, typename Store>
  ONEFLOW_ACCEL_INLINE void softmax_grad(int64_t first, int64_t n, const T* softmax_y,
                                         const T* y_grad, const Store& store) const {
    const auto y = row::values_of(softmax_y + first);
    const auto dy = row::values_of(y_grad + first);
    if (mask == nullptr) { return row::softmax_grad(n, y, dy, store); }
    const uint8_t* keep = mask + first;
    const float factor = scale;
    row::softmax_grad(
        n, y, [=](int64_t i) { return dy(i) * random::kept(keep[i], factor); }, store);
  }
};

template <typename T>
void scale_mask_softmax_kernel(Context* ctx) {
  const RowSet rows(ctx, "x");
  const BroadcastRows mask_rows(ctx, "x", "mask");
  const uint8_t* mask = random::mask_bytes(ctx, "mask");
  const Dropout dropout(ctx, "dropout_mask", "dropout_scale_value");
  const float scale = ctx->Attr<float>("scale_value");
  const float fill = ctx->Attr<float>("mask_fill_value");
  const T* in = input<T>(ctx, "x");
  const T* bias = input_or_null<T>(ctx, "bias");
  const BroadcastRows bias_rows(ctx, "x", bias == nullptr ? "x" : "bias");
  T* softmax_y = output<T>(ctx, dropout.softmax_name);
  T* y = output<T>(ctx, "y");
  rows.for_each(kSoftmaxOperations, [&](int64_t, int64_t first) {
    const auto x = row::values_of(in + first);
    const uint8_t* seen = mask + mask_rows.offset(first);
    const auto softmax = [&](const auto& scores) {
      dropout.softmax(
          first, rows.n, [=](int64_t i) { return choose(seen[i] != 0, scores(i) * scale, fill); },
          softmax_y, y);
    };
    if (bias == nullptr) { return softmax(x); }
    const T* of_row = bias + bias_rows.offset(first);
    if (bias_rows.single_value()) {
      const float value = to_float(*of_row);
      return softmax([=](int64_t i) { return x(i) + value; });
    }
    softmax([=](int64_t i) { return x(i) + to_float(of_row[i]); });
  });
}

template <typename T>
void scale_mask_softmax_grad_kernel(Context* ctx) {
  const RowSet rows(ctx, "dy");
  const BroadcastRows mask_rows(ctx, "dy", "mask");
  const uint8_t* mask = random::mask_bytes(ctx, "mask");
  const Dropout dropout(ctx, "dropout_mask", "dropout_scale_value");
  const float scale = ctx->Attr<float>("scale_value");
  const T* softmax_y = input<T>(ctx, dropout.softmax_name);
  const T* dy = input<T>(ctx, "dy");
  T* in_grad = output<T>(ctx, "dx");
  rows.for_each(kSoftmaxOperations, [&](int64_t, int64_t first) {
    const uint8_t* seen = mask + mask_rows.offset(first);
    T* dx = in_grad + first;
    dropout.softmax_grad(first, rows.n, softmax_y, dy, [=](int64_t i, float value) {
      dx[i] = from_float<T>(choose(seen[i] != 0, value * scale, 0.0F));
    });
  });
}

template <typename T>
void tril_softmax_kernel(Context* ctx) {
  const RowSet rows(ctx, "x");
  const auto columns = columns_seen(ctx, "x");
  const Dropout dropout(ctx, "mask", "mask_scale_value");
  const float scale = ctx->Attr<float>("tril_scale_value");
  const float fill = ctx->Attr<float>("tril_fill_value");
  const T* in = input<T>(ctx, "x");
  T* softmax_y = output<T>(ctx, "softmax_y");
  T* y = output<T>(ctx, "y");
  rows.for_each(kSoftmaxOperations, [&](int64_t row, int64_t first) {
    const T* x = in + first;
    const int64_t seen = columns(row);
    const auto scaled = [=](int64_t i) { return to_float(x[i]) * scale; };
    // So far below the largest element e^z is 0 in float32: the rest need not be computed.
    constexpr float kNegligible = -105.0F;
    if (fill - row::maximum_of(seen, scaled) < kNegligible) {
      dropout.softmax(first, seen, scaled, softmax_y, y);
      for (T* to : {softmax_y + first, y + first}) { std::fill(to + seen, to + rows.n, T{}); }
    } else {
      dropout.softmax(
          first, rows.n, [=](int64_t i) { return choose(i < seen, scaled(i), fill); }, softmax_y,
          y);
    }
  });
}

template <typename T>
void tril_softmax_grad_kernel(Context* ctx) {
  const RowSet rows(ctx, "dy");
  const auto columns = columns_seen(ctx, "dy");
  const Dropout dropout(ctx, "mask", "mask_scale_value");
  const float scale = ctx->Attr<float>("tril_scale_value");
  const T* softmax_y = input<T>(ctx, "softmax_y");
  const T* dy = input<T>(ctx, "dy");
  T* in_grad = output<T>(ctx, "dx");
  rows.for_each(kSoftmaxOperations, [&](int64_t row, int64_t first) {
    T* dx = in_grad + first;
    const int64_t seen = columns(row);
    // All of the rest has one value; where it is 0 it adds nothing to the sum over the row.
    const bool rest_is_zero = seen < rows.n && to_float(softmax_y[first + seen]) == 0.0F;
    dropout.softmax_grad(first, rest_is_zero ? seen : rows.n, softmax_y, dy,
                         [=](int64_t i, float value) { dx[i] = from_float<T>(value * scale); });
    std::fill(dx + seen, dx + rows.n, T{});
  });
}

REGISTER_KERNELS(scale_mask_softmax_kernel,
                 "fused_scale_mask_softmax fused_scale_mask_softmax_dropout", "x");
REGISTER_KERNELS(scale_mask_softmax_grad_kernel,
                 "fused_scale_mask_softmax_grad fused_scale_mask_softmax_dropout_grad", "dy");
REGISTER_KERNELS(tril_softmax_kernel, "fused_tril_scale_softmax_mask_scale", "y");
REGISTER_KERNELS(tril_softmax_grad_kernel, "fused_tril_scale_softmax_mask_scale_grad", "dx");

// OneFlow lets this operator's mask be of an integer type as well.
const auto kHasTruthMask = user_op::HobDataType("mask", 0) == DataType::kBool;
constexpr const char* kWithBias = "fused_bias_add_scale_mask_softmax_dropout";
REGISTER_KERNEL(kWithBias, kernel(scale_mask_softmax_kernel<float>),
                is_float32_on_cpu("x") && kHasTruthMask);
REGISTER_KERNEL(kWithBias, kernel(scale_mask_softmax_kernel<Bfloat16>),
                is_bfloat16_on_cpu("x") && kHasTruthMask);

}  // namespace

}  // namespace oneflow_accel
