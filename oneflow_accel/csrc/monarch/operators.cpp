// oneflow_accel_monarch, which computes y = x M^T (+ bias), oneflow_accel_monarch_keeping, which
// also gives what the gradient needs, and the gradient. float32, and bfloat16 by way of float32
// copies of some rows at a time: oneDNN's bfloat16 products would need u and v in memory, permuted.
#include <utility>

#include "attention/block_product.h"
#include "common/infer.h"
#include "common/onednn.h"
#include "common/oneflow.h"
#include "elementwise/map.h"
#include "monarch/monarch.h"
#include "softmax/row_set.h"

namespace oneflow_accel {

namespace {

using ::oneflow::Shape;

// The shape of x with another length of its rows.
Shape rows_of(const Shape& x, int64_t length) {
  Shape shape = x;
  shape.Set(x.NumAxes() - 1, length);
  return shape;
}

Maybe<void> check(const Shape& x, const Shape& a, const Shape& b, int64_t out_features) {
  const bool factors = a.NumAxes() == 3 && b.NumAxes() == 3 && a.elem_cnt() > 0 && b.elem_cnt() > 0
                       && a.At(0) * a.At(1) == b.At(0) * b.At(2);
  if (!factors || x.NumAxes() < 1 || x.At(x.NumAxes() - 1) < 1
      || x.At(x.NumAxes() - 1) > a.At(0) * a.At(2) || out_features < 1
      || out_features > b.At(0) * b.At(1)) {
    return Error::RuntimeError()
           << "a Monarch product needs factors of (k, q, p) and (l, s, r) with k q = l r, rows of "
              "at most k p and at most l s results, not "
           << a.ToString() << ", " << b.ToString() << ", rows of " << x.ToString() << " and "
           << out_features << " results";
  }
  return Maybe<void>::Ok();
}

Maybe<void> infer(user_op::InferContext* ctx) {
  const Shape& x = ctx->InputShape("x", 0);
  const int64_t out_features = ctx->Attr<int64_t>("out_features");
  JUST(check(x, ctx->InputShape("blkdiag1", 0), ctx->InputShape("blkdiag2", 0), out_features));
  if (ctx->has_input("bias", 0) && ctx->InputShape("bias", 0) != Shape({out_features})) {
    return Error::RuntimeError() << "a Monarch product to " << out_features
                                 << " columns needs as long a bias, not "
                                 << ctx->InputShape("bias", 0).ToString();
  }
  describe_output(ctx, "y", rows_of(x, out_features));
  if (ctx->has_output("middle", 0)) {
    const Shape& a = ctx->InputShape("blkdiag1", 0);
    describe_output(ctx, "middle", rows_of(x, a.At(0) * a.At(1)));
  }
  return Maybe<void>::Ok();
}

Maybe<void> infer_grad(user_op::InferContext* ctx) {
  const Shape& y_grad = ctx->InputShape("y_grad", 0);
  const int64_t out_features = y_grad.At(y_grad.NumAxes() - 1);
  const Shape& x = ctx->InputShape("x", 0);
  const Shape& a = ctx->InputShape("blkdiag1", 0);
  const Shape& b = ctx->InputShape("blkdiag2", 0);
  JUST(check(x, a, b, out_features));
  if (y_grad != rows_of(x, out_features)
      || ctx->InputShape("middle", 0) != rows_of(x, a.At(0) * a.At(1))) {
    return Error::RuntimeError() << "the gradient of a Monarch product of " << x.ToString()
                                 << " needs as many rows of the others, not " << y_grad.ToString()
                                 << " and " << ctx->InputShape("middle", 0).ToString();
  }
  describe_output(ctx, "bias_grad", Shape({out_features}));
  return describe_gradients(ctx);
}

const auto kTypes = one_dtype("a Monarch product");

// Rows do not know of each other; factors and bias are the same for all of them, and their
// gradients are sums over the rows.
Maybe<void> split_rows(user_op::SbpContext* ctx) {
  const int64_t axes = ctx->LogicalTensorDesc4InputArgNameAndIndex("x", 0).shape().NumAxes();
  for (int64_t axis = 0; axis + 1 < axes; ++axis) { split_all_but(ctx, axis, "blkdiag bias"); }
  return Maybe<void>::Ok();
}

const NewOperator g_operators[] = {
    new_operator("oneflow_accel_monarch", "x blkdiag1 blkdiag2 bias?", "y", infer, kTypes,
                 split_rows)
        .Attr<int64_t>("out_features"),
    new_operator("oneflow_accel_monarch_keeping", "x blkdiag1 blkdiag2 bias?", "y middle", infer,
                 kTypes, split_rows)
        .Attr<int64_t>("out_features"),
    new_operator("oneflow_accel_monarch_grad", "y_grad x blkdiag1 blkdiag2 middle",
                 "x_grad blkdiag1_grad blkdiag2_grad bias_grad", infer_grad, kTypes, split_rows)};

MonarchShape monarch_shape(Context* ctx, int64_t out_features) {
  const auto& a = shape_of(ctx, "blkdiag1");
  const auto& b = shape_of(ctx, "blkdiag2");
  const RowSet x(ctx, "x");
  return {x.count, x.n, out_features, a.At(0), a.At(1), a.At(2), b.At(0), b.At(1), b.At(2)};
}

// Rows that are worked on before the next ones: of so many the gradient of v is kept, and copies of
// what is bfloat16.
constexpr int64_t kMostRowsAtOnce = 1024;

// Calls fn(begin, some) for parts of the rows, of one size, or nearly, and the same whatever the
// number of threads; `some` has as many rows.
template <typename Fn>
void for_parts(const MonarchShape& shape, int64_t most, const Fn& fn) {
  const int64_t parts = ceil_div(shape.rows, most);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t begin = shape.rows * part / parts;
    MonarchShape some = shape;
    some.rows = shape.rows * (part + 1) / parts - begin;
    fn(begin, some);
  }
}

// Tensors as float32: themselves, or copies in one buffer of scratch memory. A copy of this object
// hands out what follows its parts once more.
template <typename T>
class Floats {
 public:
  // `copies`: floats of tensors that are not float32. `sums`: those of place_rows().
  Floats(int64_t copies, int64_t sums) {
    const int64_t all = kThemselves ? sums : copies + sums;
    if (all > 0) { next_ = scratch<float>(ScratchSlot::kRoundedA, all); }
  }

  const float* read(const T* data, int64_t n) {
    float* floats = place(const_cast<T*>(data), n);
    if (floats != nullptr && !kThemselves) { convert(data, floats, n); }
    return floats;
  }
  // Where to write what write() then takes to `data`.
  float* place(T* data, int64_t n) {
    if constexpr (kThemselves) {
      return data;
    } else {
      return data == nullptr ? nullptr : std::exchange(next_, next_ + n);
    }
  }
  static void write(const float* floats, int64_t n, T* data) {
    if (floats != nullptr && !kThemselves) { convert(floats, data, n); }
  }
  // The same in rows of whole vectors.
  float* place_rows(T* data, int64_t rows, int64_t width) {
    return padded(width) == width ? place(data, rows * width)
                                  : std::exchange(next_, next_ + rows * padded(width));
  }
  static void write_rows(const float* floats, int64_t rows, int64_t width, T* data) {
    if (padded(width) == width) { return write(floats, rows * width, data); }
    for (int64_t row = 0; row < rows; ++row) {
      convert(floats + row * padded(width), data + row * width, width);
    }
  }

 private:
  static constexpr bool kThemselves = std::is_same_v<T, float>;

  float* next_ = nullptr;
};

template <typename T>
void monarch_kernel(Context* ctx) {
  const MonarchShape shape = monarch_shape(ctx, ctx->Attr<int64_t>("out_features"));
  if (shape.rows == 0) { return; }
  const int64_t most = std::is_same_v<T, float> ? shape.rows : kMostRowsAtOnce;
  run_or_throw([&] { return shape.describe(); }, [&] {
    Floats<T> floats(shape.factors() + shape.out_features
                         + std::min(most, shape.rows)
                               * (shape.in_features + shape.middle() + shape.out_features),
                     0);
    const float* a = floats.read(input<T>(ctx, "blkdiag1"), shape.a_size());
    const float* b = floats.read(input<T>(ctx, "blkdiag2"), shape.b_size());
    const float* bias = floats.read(input_or_null<T>(ctx, "bias"), shape.out_features);
    T* all_kept = output_or_null<T>(ctx, "middle");
    for_parts(shape, most, [&](int64_t begin, const MonarchShape& some) {
      Floats<T> of_part = floats;
      const T* x = input<T>(ctx, "x") + begin * some.in_features;
      T* kept = all_kept == nullptr ? nullptr : all_kept + begin * some.middle();
      T* y = output<T>(ctx, "y") + begin * some.out_features;
      const int64_t kept_size = some.rows * some.middle();
      const int64_t y_size = some.rows * some.out_features;
      float* middle = of_part.place(kept, kept_size);
      float* result = of_part.place(y, y_size);
      monarch(some, {of_part.read(x, some.rows * some.in_features), a, b, by_tiles<T>()}, bias,
              middle, result);
      of_part.write(middle, kept_size, kept);
      of_part.write(result, y_size, y);
    });
  });
}

template <typename T>
void monarch_grad_of(Context* ctx, const MonarchShape& shape) {
  const int64_t a_rows = shape.k * shape.q;
  const int64_t b_rows = shape.l * shape.s;
  const int64_t sums = a_rows * padded(shape.p) + b_rows * padded(shape.r);
  Floats<T> floats(shape.factors() + shape.out_features
                       + std::min(kMostRowsAtOnce, shape.rows)
                             * (2 * shape.in_features + shape.middle() + shape.out_features),
                   sums);
  const float* a = floats.read(input<T>(ctx, "blkdiag1"), shape.a_size());
  const float* b = floats.read(input<T>(ctx, "blkdiag2"), shape.b_size());
  // Sums over all rows, so float32 up to the end.
  T* a_out = output<T>(ctx, "blkdiag1_grad");
  T* b_out = output<T>(ctx, "blkdiag2_grad");
  T* bias_out = output<T>(ctx, "bias_grad");
  float* a_grad = floats.place_rows(a_out, a_rows, shape.p);
  float* b_grad = floats.place_rows(b_out, b_rows, shape.r);
  float* bias_grad = floats.place(bias_out, shape.out_features);
  if (shape.rows == 0) {
    std::fill_n(a_grad, a_rows * padded(shape.p), 0.0F);
    std::fill_n(b_grad, b_rows * padded(shape.r), 0.0F);
    std::fill_n(bias_grad, shape.out_features, 0.0F);
  }
  for_parts(shape, kMostRowsAtOnce, [&](int64_t begin, const MonarchShape& some) {
    Floats<T> of_part = floats;
    const auto rows = [&](const char* name, int64_t width) {
      return of_part.read(input<T>(ctx, name) + begin * width, some.rows * width);
    };
    const int64_t x_size = some.rows * some.in_features;
    T* x_grad = output<T>(ctx, "x_grad") + begin * some.in_features;
    float* result = of_part.place(x_grad, x_size);
    monarch_grad(some, {rows("x", some.in_features), a, b, by_tiles<T>()},
                 rows("middle", some.middle()), rows("y_grad", some.out_features),
                 {result, a_grad, b_grad, bias_grad}, begin > 0);
    of_part.write(result, x_size, x_grad);
  });
  floats.write_rows(a_grad, a_rows, shape.p, a_out);
  floats.write_rows(b_grad, b_rows, shape.r, b_out);
  floats.write(bias_grad, shape.out_features, bias_out);
}

template <typename T>
void monarch_grad_kernel(Context* ctx) {
  const MonarchShape shape = monarch_shape(ctx, RowSet(ctx, "y_grad").n);
  run_or_throw([&] { return "gradient of " + shape.describe(); },
               [&] { monarch_grad_of<T>(ctx, shape); });
}

REGISTER_KERNELS(monarch_kernel, "oneflow_accel_monarch oneflow_accel_monarch_keeping", "y");
REGISTER_KERNELS(monarch_grad_kernel, "oneflow_accel_monarch_grad", "x_grad");

}  // namespace

}  // namespace oneflow_accel
