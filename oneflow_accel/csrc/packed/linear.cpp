// oneflow_accel_packed_linear: y = residual + act(W norm(x) + bias) of rows x (rows, in), float32,
// and weights of 32, 16 or 8 bits in packed panels (packed/product.h). It reads each weight once,
// which is what a step of generation takes its time for; the norm before the product and what comes
// after it take none.
#include "activation/formulas.h"
#include "common/infer.h"
#include "common/oneflow.h"
#include "norm/row_norm.h"
#include "packed/product.h"

namespace oneflow_accel::packed {

namespace {

using ::oneflow::Shape;

// Rows whose sums stay in a core's first-level cache.
constexpr int64_t kRowsAtOnce = 96;
// Outputs of a panel where the first half are gates of the second.
constexpr int64_t kHalf = kPanel / 2;

enum Activation { kNone, kRelu, kGelu, kFastGelu, kSwiglu, kUnknown };

Activation activation_of(const std::string& name) {
  const std::string names[] = {"", "relu", "gelu", "gelu_tanh", "swiglu"};
  return static_cast<Activation>(std::find(names, names + kUnknown, name) - names);
}

Maybe<void> infer(user_op::InferContext* ctx) {
  const Shape& x = ctx->InputShape("x", 0);
  const Shape& panels = ctx->InputShape("panels", 0);
  const auto values = ctx->Attr<int32_t>("values");
  const int64_t outputs = ctx->Attr<int32_t>("outputs");
  const auto activation = activation_of(ctx->Attr<std::string>("activation"));
  const bool halves = activation == kSwiglu;
  const int64_t count = ceil_div(outputs, kPanel);
  const bool fits = x.NumAxes() == 2 && (values == 1 || values == 2 || values == 4)
                    && panels == Shape({count, Weights{nullptr, values, x.At(1)}.depth(), kPanel});
  const Shape y({x.At(0), halves ? outputs / 2 : outputs});
  const Shape all({count * kPanel});
  const Shape in({x.At(x.NumAxes() - 1)});
  const auto has = [&](const char* name, const Shape& shape) {
    return !ctx->has_input(name, 0) || ctx->InputShape(name, 0) == shape;
  };
  if (!fits || activation == kUnknown || !has("scales", all) || !has("residual", y)
      || !has("norm_weight", in) || !has("norm_bias", in)
      || ctx->has_input("scales", 0) != (values == 4)
      || !has("bias", all) || outputs % (halves ? 2 : 1) != 0) {
    return Error::RuntimeError()
           << "a packed linear layer of " << outputs << " outputs cannot take x " << x.ToString()
           << " and panels " << panels.ToString() << " of " << values
           << " values in a word, or its other inputs or its activation do not fit";
  }
  describe_output(ctx, "y", y);
  return Maybe<void>::Ok();
}

Maybe<void> infer_types(user_op::InferContext* ctx) {
  for (const auto& [name, index] : ctx->inputs()) {
    if (ctx->InputDType(name, index) != (name == "panels" ? DataType::kInt32 : DataType::kFloat)) {
      return Error::RuntimeError() << "a packed linear layer: " << name << " has a wrong dtype";
    }
  }
  ctx->SetOutputDType("y", 0, DataType::kFloat);
  return Maybe<void>::Ok();
}

Maybe<void> split(user_op::SbpContext* ctx) {
  split_along(ctx, [](const std::string& name) {
    return name == "x" || name == "residual" || name == "y" ? 0 : kWhole;
  });
  return Maybe<void>::Ok();
}

const NewOperator g_linear =
    new_operator("oneflow_accel_packed_linear",
                 "x panels scales? bias? residual? norm_weight? norm_bias?", "y", infer,
                 infer_types, split)
        .Attr<int32_t>("values", 1).Attr<int32_t>("outputs", 0).Attr<std::string>("activation", "")
        .Attr<std::string>("norm", "").Attr<double>("epsilon", 1e-5);

// What a panel's sums become. Pointers begin at the panel; null for none.
struct End {
  const float* scales;
  const float* bias;
  const float* residual;
  float* y;
  int64_t stride;
  int64_t columns;
};

template <Activation activation>
void store_row(const float* sums, const End& end, int64_t row) {
  alignas(64) float c[kPanel];
#pragma omp simd
  for (int64_t j = 0; j < kPanel; ++j) {
    c[j] = end.scales == nullptr ? sums[j] : sums[j] * end.scales[j];
  }
  if (end.bias != nullptr) {
#pragma omp simd
    for (int64_t j = 0; j < kPanel; ++j) { c[j] += end.bias[j]; }
  }
  constexpr int64_t kColumns = activation == kSwiglu ? kHalf : kPanel;
#pragma omp simd
  for (int64_t j = 0; j < kColumns; ++j) {
    if constexpr (activation == kRelu) { c[j] = c[j] < 0.0F ? 0.0F : c[j]; }
    if constexpr (activation == kGelu) { c[j] = gelu(c[j]); }
    if constexpr (activation == kFastGelu) { c[j] = fast_gelu(c[j]); }
    if constexpr (activation == kSwiglu) { c[j] = silu(c[j]) * c[kHalf + j]; }
  }
  const float* residual = end.residual == nullptr ? nullptr : end.residual + row * end.stride;
  float* y = end.y + row * end.stride;
  for (int64_t j = 0; j < end.columns; ++j) {
    y[j] = residual == nullptr ? c[j] : residual[j] + c[j];
  }
}

constexpr void (*kStores[])(const float*, const End&, int64_t) = {
    store_row<kNone>, store_row<kRelu>, store_row<kGelu>, store_row<kFastGelu>, store_row<kSwiglu>};

void linear_kernel(Context* ctx) {
  const int64_t rows = shape_of(ctx, "x").At(0);
  const int64_t in = shape_of(ctx, "x").At(1);
  const auto activation = activation_of(ctx->Attr<std::string>("activation"));
  const Weights weights{static_cast<const float*>(argument(ctx, "panels")->dptr()),
                        ctx->Attr<int32_t>("values"), in};
  const ThreadScope threads;
  const float* x = input(ctx, "x");
  if (const auto norm = ctx->Attr<std::string>("norm"); !norm.empty()) {
    auto* normed = scratch<float>(ScratchSlot::kDestination, rows * (in + 2));
    float* statistics = normed + rows * in;
    row_norm<float>({rows, in, ctx->Attr<double>("epsilon"), x, input_or_null(ctx, "norm_weight"),
                     input_or_null(ctx, "norm_bias"), normed,
                     norm == "rms" ? nullptr : statistics, statistics + rows});
    x = normed;
  }
  const Rows left = as_words(x, rows, weights);
  const bool halves = activation == kSwiglu;
  const int64_t outputs = ctx->Attr<int32_t>("outputs");
  const int64_t width = halves ? outputs / 2 : outputs;
  const int64_t step = halves ? kHalf : kPanel;
  const float* scales = input_or_null(ctx, "scales");
  const float* bias = input_or_null(ctx, "bias");
  const float* residual = input_or_null(ctx, "residual");
  float* y = output(ctx, "y");
  const auto store = kStores[activation];
  const int64_t chunks = ceil_div(rows, kRowsAtOnce);
  const int64_t work = std::min(rows, kRowsAtOnce) * kPanel * in;
  for_each_block(ceil_div(outputs, kPanel) * chunks, work, [=](int64_t block) {
    alignas(64) float c[kRowsAtOnce * kPanel];
    const int64_t panel = block / chunks;
    const int64_t row = block % chunks * kRowsAtOnce;
    const int64_t count = std::min(kRowsAtOnce, rows - row);
    multiply(left.from(row), count, weights, panel, c);
    const int64_t first = row * width + panel * step;
    const End end{scales == nullptr ? nullptr : scales + panel * kPanel,
                  bias == nullptr ? nullptr : bias + panel * kPanel,
                  residual == nullptr ? nullptr : residual + first,
                  y + first,
                  width,
                  std::min(step, width - panel * step)};
    for (int64_t i = 0; i < count; ++i) { store(c + i * kPanel, end, i); }
  });
}

REGISTER_FLOAT_KERNEL(linear_kernel, "oneflow_accel_packed_linear", "y");

}  // namespace

}  // namespace oneflow_accel::packed
