// Autocast to bfloat16 on CPUs, which OneFlow knows and never does: MakeAutoCastMeta() makes
// operators eligible on CUDA only. It is called once for each operator that is built, within OneFlow
// as well, so that eager code and traced graphs both get what it says here.
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "common/redirect.h"
#include "oneflow/core/common/data_type.h"
#include "oneflow/core/framework/autocast.h"

namespace oneflow_accel {

namespace {

using ::oneflow::autocast::AutoCastColor;
using ::oneflow::autocast::AutoCastMeta;
using Arguments = std::vector<std::pair<std::string, int32_t>>;
using Names = std::set<std::string>;

// The operators that have kernels in bfloat16, their gradients too: their inputs become bfloat16.
const Names kInBfloat16{
    "matmul", "batch_matmul", "broadcast_matmul", "broadcast_matmul_grad_b", "fused_matmul_bias",
    "bias_add", "conv1d", "conv2d", "conv3d", "oneflow_accel_channels_last_conv2d",
    "oneflow_accel_attention", "oneflow_accel_packed_attention", "oneflow_accel_swiglu",
    "fused_bias_add_gelu", "fused_bias_add_mask_scale",
    "fused_bias_add_scale_mask_softmax_dropout", "oneflow_accel_monarch",
    "oneflow_accel_monarch_keeping"};
// They stay in bfloat16 where all inputs are. Any other's inputs become float32.
const Names kAsTheyCome{
    "normalization", "normalization_add_relu", "layer_norm", "rms_norm", "oneflow_accel_rope",
    "add_n", "broadcast_add", "broadcast_sub", "broadcast_mul", "fast_gelu", "gelu", "quick_gelu",
    "reduce_sum", "reduce_sum_like", "relu", "scalar_add", "scalar_div", "scalar_mul", "sigmoid",
    "silu", "tanh", "oneflow_accel_performer", "oneflow_accel_cross_entropy", "dropout",
    "fused_scale_mask_softmax", "fused_scale_mask_softmax_dropout",
    "fused_tril_scale_softmax_mask_scale"};
// The same, and they only move values.
const Names kMoves{
    "broadcast_like", "concat", "copy", "expand", "expand_dims", "hierarchical_parallel_cast",
    "hierarchical_parallel_cast_like", "identity", "narrow", "reshape", "reshape_like", "slice",
    "split_like", "squeeze", "to_contiguous", "transpose"};

AutoCastColor color_of(const std::string& op) {
  if (kInBfloat16.count(op) > 0) { return ::oneflow::autocast::kWhite; }
  if (kAsTheyCome.count(op) > 0) { return ::oneflow::autocast::kGray; }
  return kMoves.count(op) > 0 ? ::oneflow::autocast::kClear : ::oneflow::autocast::kNoColor;
}

// What stays float32 whatever the operator runs in, beside what OneFlow says so of.
bool stays_float32(const std::string& op, const std::string& input) {
  return (op == "oneflow_accel_rope" && input != "x")
         || (op == "oneflow_accel_performer" && input != "kqv");
}

std::shared_ptr<AutoCastMeta> make_meta(const std::string& op, const Arguments& inputs) {
  auto meta = ::oneflow::autocast::MakeAutoCastMeta(op, inputs);
  const AutoCastColor color = color_of(op);
  if (color == ::oneflow::autocast::kNoColor) { return meta; }
  // Others than OneFlow's for CUDA: operators that it does not know, and biases, which are parameters
  // in float32.
  if (meta->autocast_color() != color) {
    const auto of_stock = std::exchange(meta, std::make_shared<AutoCastMeta>(inputs.size()));
    meta->set_autocast_color(color);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (of_stock->is_args_autocast_eligible(i) && !stays_float32(op, inputs[i].first)) {
        meta->set_arg_autocast_eligible(i);
      }
    }
  }
  // And on the emulated device (emulated/stock.cpp).
  for (const auto device : {::oneflow::kCPU, ::oneflow::kMockDevice}) {
    meta->set_autocast_eligible(device, ::oneflow::DType::BFloat16());
  }
  return meta;
}

using DType = ::oneflow::Symbol<::oneflow::DType>;

// OneFlow has bfloat16 for what bfloat16 and float32 have in common, so that operators that autocast
// is to run in float32 would stay in bfloat16: it asks while autocast is off. Where it is on, what is
// asked is what a sum of both is to be: bfloat16, for activations and biases.
DType common_type(DType a, DType b) {
  const DType common = ::oneflow::promoteTypes(a, b);
  const bool has_float32 = a == ::oneflow::DType::Float() || b == ::oneflow::DType::Float();
  return has_float32 && common == ::oneflow::DType::BFloat16() && !::oneflow::autocast::is_enabled()
             ? ::oneflow::DType::Float()
             : common;
}

// OneFlow's own leaves bfloat16 out, so that its mean of one is an error.
bool is_floating(DataType type) {
  return type == ::oneflow::kBFloat16 || ::oneflow::IsFloatingDataType(type);
}

constexpr const char* kIsFloatingDataType = "_ZN7oneflow18IsFloatingDataTypeENS_8DataTypeE";
constexpr const char* kPromoteTypes = "_ZN7oneflow12promoteTypesENS_6SymbolINS_5DTypeEEES2_";
constexpr const char* kMakeAutoCastMeta =
    "_ZN7oneflow8autocast16MakeAutoCastMetaERKSsRKSt6vectorISt4pairISsiESaIS5_EE";
const bool g_casts = redirect_in_oneflow(kMakeAutoCastMeta, make_meta)
                     && redirect_in_oneflow(kPromoteTypes, common_type)
                     && redirect_in_oneflow(kIsFloatingDataType, is_floating);

}  // namespace

}  // namespace oneflow_accel
