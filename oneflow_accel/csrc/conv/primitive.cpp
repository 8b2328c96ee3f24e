#include "conv/primitive.h"

#include <algorithm>
#include <atomic>
#include <optional>

#include "common/bfloat16.h"
#include "common/kept_weights.h"
#include "common/threads.h"
#include "conv/pack_weights.h"

namespace oneflow_accel {

namespace {

// Pixels of one output image from which on a GEMM per image beats copying to a blocked layout.
constexpr int64_t kLargeImage = 28 * 28;

// Vector length of the blocked layouts: fewer input channels fill them with zeros.
constexpr int64_t kChannelBlock = 16;

// What a primitive's layout costs is a copy of each activation: so much of them exists at a time,
// enough for each thread to be busy.
constexpr int64_t kCopiedBytesPerThread = 16 << 20;

// Whether oneDNN is asked for OneFlow's own layout of the activations, or for whichever it likes
// best (a blocked one), which costs a copy of each activation in exchange for faster inner loops.
//
// Measured on 2 cores with AVX-512, for all convolutions of ResNet50. Channels last: oneDNN's
// kernels read it as fast as blocked layouts. Channels first: as it stands there is only
// im2col + GEMM, which wins where im2col has nothing to do and one image makes a large GEMM.
bool keeps_layout(const ConvGeometry& g, ConvRole result) {
  if (g.channels_last) { return true; }
  if (result == kConvWeights) { return false; }
  const bool few_channels = result == kConvIn && g.groups() == 1 && g.in[1] < kChannelBlock;
  const bool large = g.groups() == 1 && g.is_pointwise() && g.out_pixels() >= kLargeImage;
  return large || few_channels;
}

// How many images of a convolution are copied at a time: all, or as many as fit, and then rather a
// divisor of all, so that there is one primitive for all parts. A sum over the images, the gradient
// of the weights, is not among what can be done so.
int64_t images_at_a_time(const ConvGeometry& g, ConvRole result) {
  const int64_t images = g.in[0];
  if (keeps_layout(g, result) || result == kConvWeights) { return images; }
  const int64_t bytes = (g.in_image() + g.out_image()) * g.element_bytes();
  const int64_t most = std::max<int64_t>(1, num_threads() * kCopiedBytesPerThread / bytes);
  if (most >= images) { return images; }
  for (int64_t count = most; count > most / 2; --count) {
    if (images % count == 0) { return count; }
  }
  return most;
}

dnnl::primitive_attr attributes(const ConvGeometry& geometry, const ConvCall& call) {
  dnnl::primitive_attr attr = user_scratchpad_attr();
  dnnl::post_ops ops;
  if (call.summand != nullptr) {
    ops.append_binary(dnnl::algorithm::binary_add, geometry.desc(kConvOut));
  }
  if (call.activation == Activation::kRelu) {
    ops.append_eltwise(dnnl::algorithm::eltwise_relu, 0.0F, 0.0F);
  } else if (call.activation == Activation::kSilu) {
    // x sigmoid(alpha x)
    ops.append_eltwise(dnnl::algorithm::eltwise_swish, 1.0F, 0.0F);
  }
  attr.set_post_ops(ops);
  return attr;
}

dnnl::primitive_desc conv_desc(const ConvGeometry& g, const ConvCall& call) {
  constexpr auto kDirect = dnnl::algorithm::convolution_direct;
  const bool plain = keeps_layout(g, call.result);
  const auto in = plain ? g.desc(kConvIn) : g.any_layout(g.in);
  const auto out = plain ? g.desc(kConvOut) : g.any_layout(g.out);
  const auto weights = g.any_layout(g.desc(kConvWeights).get_dims());
  const auto attr = attributes(g, call);
  const auto bias = [&](ConvRole result, dnnl::memory::data_type type) {
    const bool has_bias = call.result == result && call.bias != nullptr;
    return has_bias ? dnnl::memory::desc({g.out[1]}, type, dnnl::memory::format_tag::a)
                    : dnnl::memory::desc();
  };
  // To the gradients a hint.
  const dnnl::convolution_forward::primitive_desc forward(
      cpu_engine(),
      call.inference ? dnnl::prop_kind::forward_inference : dnnl::prop_kind::forward_training,
      kDirect, in, weights, bias(kConvOut, dnnl::memory::data_type::f32), out, g.strides,
      g.dilation, g.padding, g.padding, attr, /*allow_empty=*/true);
  if (!forward || call.result == kConvOut) { return forward; }
  if (call.result == kConvIn) {
    return dnnl::convolution_backward_data::primitive_desc(
        cpu_engine(), kDirect, in, weights, out, g.strides, g.dilation, g.padding, g.padding,
        forward, attr);
  }
  return dnnl::convolution_backward_weights::primitive_desc(
      cpu_engine(), kDirect, in, weights, bias(kConvWeights, g.data_type), out, g.strides,
      g.dilation, g.padding, g.padding, forward, attr);
}

// A tensor between OneFlow's layout, `plain`, and the one that a primitive chose: copied by way of
// scratch memory where they differ.
class ConvTensor {
 public:
  ConvTensor(const dnnl::primitive_desc& primitive, int argument, const dnnl::memory::desc& plain,
             ScratchSlot slot, bool is_result)
      : argument(argument),
        plain_(plain),
        inner_(primitive.query_md(dnnl::query::exec_arg_md, argument)),
        slot_(slot),
        is_result_(is_result),
        packed_by_us_(!is_result && can_pack_weights(plain_, inner_)) {
    if (is_plain() || packed_by_us_) { return; }
    const dnnl::reorder::primitive_desc desc(cpu_engine(), is_result ? inner_ : plain_,
                                             cpu_engine(), is_result ? plain_ : inner_,
                                             user_scratchpad_attr());
    reorder_ = dnnl::reorder(desc);
    scratchpad_ = desc.scratchpad_desc();
  }

  // What the primitive reads or writes; valid until the thread uses the slot again. Weights of
  // inference have an owner, whose copy it is then.
  dnnl::memory begin(void* data, int64_t owner) const {
    if (is_plain()) { return wrap(plain_, data); }
    const auto copy_data = [&](const dnnl::memory& inner) { copy(wrap(plain_, data), inner); };
    if (auto kept = kept_weights(owner, data, plain_, inner_, copy_data)) { return kept; }
    const dnnl::memory inner = wrap(inner_, scratch(slot_, inner_.get_size()));
    if (!is_result_) { copy_data(inner); }
    return inner;
  }

  // After the primitive has run, for its result.
  void end(const dnnl::memory& inner, void* data) const {
    if (!is_plain()) { copy(inner, wrap(plain_, data)); }
  }

  const int argument;

 private:
  bool is_plain() const { return plain_ == inner_; }

  void copy(dnnl::memory from, dnnl::memory to) const {
    if (packed_by_us_) {
      return pack_weights(inner_, static_cast<const float*>(from.get_data_handle()),
                          static_cast<float*>(to.get_data_handle()));
    }
    reorder_.execute(cpu_stream(), {{DNNL_ARG_FROM, from},
                                    {DNNL_ARG_TO, to},
                                    {DNNL_ARG_SCRATCHPAD, scratchpad_memory(scratchpad_)}});
  }

  dnnl::memory::desc plain_;
  dnnl::memory::desc inner_;
  ScratchSlot slot_;
  bool is_result_;
  bool packed_by_us_;
  dnnl::reorder reorder_;
  dnnl::memory::desc scratchpad_;
};

struct ConvPrimitive {
  dnnl::primitive primitive;
  ConvTensor tensors[3];
  int bias_argument;
  dnnl::memory::desc bias;
  dnnl::memory::desc summand;
  dnnl::memory::desc scratchpad;

  ConvPrimitive(const ConvGeometry& geometry, const dnnl::primitive_desc& desc, ConvRole result)
      : primitive(desc),
        tensors{{desc, result == kConvIn ? DNNL_ARG_DIFF_SRC : DNNL_ARG_SRC,
                 geometry.desc(kConvIn), ScratchSlot::kSource, result == kConvIn},
                {desc, result == kConvWeights ? DNNL_ARG_DIFF_WEIGHTS : DNNL_ARG_WEIGHTS,
                 geometry.desc(kConvWeights), ScratchSlot::kWeights, result == kConvWeights},
                {desc, result == kConvOut ? DNNL_ARG_DST : DNNL_ARG_DIFF_DST,
                 geometry.desc(kConvOut), ScratchSlot::kDestination, result == kConvOut}},
        bias_argument(result == kConvWeights ? DNNL_ARG_DIFF_BIAS : DNNL_ARG_BIAS),
        bias(desc.query_md(dnnl::query::exec_arg_md, bias_argument)),
        summand(geometry.desc(kConvOut)),
        scratchpad(desc.scratchpad_desc()) {}

  void run(const ConvCall& call) const {
    std::unordered_map<int, dnnl::memory> arguments;
    for (const ConvRole role : {kConvIn, kConvWeights, kConvOut}) {
      const int64_t owner = role == kConvWeights ? call.owner : 0;
      arguments.emplace(tensors[role].argument, tensors[role].begin(call.data[role], owner));
    }
    // After the copies, which use the same buffer.
    arguments.emplace(DNNL_ARG_SCRATCHPAD, scratchpad_memory(scratchpad));
    if (call.bias != nullptr) { arguments.emplace(bias_argument, wrap(bias, call.bias)); }
    if (call.summand != nullptr) {
      arguments.emplace(DNNL_ARG_ATTR_MULTIPLE_POST_OP(0) | DNNL_ARG_SRC_1,
                        wrap(summand, call.summand));
    }
    primitive.execute(cpu_stream(), arguments);
    const ConvTensor& result = tensors[call.result];
    result.end(arguments.at(result.argument), call.data[call.result]);
  }
};

// Null where oneDNN has none.
const ConvPrimitive* find_primitive(const ConvGeometry& geometry, const ConvCall& call) {
  KeyBuilder key = geometry.key("convolution");
  key.add(call.result, call.inference, call.bias != nullptr, call.summand != nullptr,
          call.activation);
  const auto& found = PrimitiveCache<std::optional<ConvPrimitive>>::get_or_create(key.str(), [&] {
    const auto desc = conv_desc(geometry, call);
    return desc ? std::make_optional<ConvPrimitive>(geometry, desc, call.result) : std::nullopt;
  });
  return found ? &*found : nullptr;
}

// Terms of a sum that bfloat16 products take at a time: up to 32 by AMX, 2 by AVX-512.
constexpr int64_t kProductDepth = 32;

bool is_finite(const ConvGeometry& geometry, const ConvCall& call, ConvRole role) {
  const auto* data = call.tensor<Bfloat16>(role);
  std::atomic<bool> finite{true};
  parallel_for(geometry.count(role), kGrainSize, [&](int64_t begin, int64_t end) {
    constexpr uint16_t kExponent = 0x7F80;
    uint16_t found = 0;
#pragma omp simd reduction(| : found)
    for (int64_t i = begin; i < end; ++i) { found |= (data[i].bits & kExponent) == kExponent; }
    if (found != 0) { finite = false; }
  });
  return finite;
}

// Whether NaN and infinity may have reached results that they have no part in. Where fewer terms
// are left than oneDNN's bfloat16 products take at a time, it fills one operand with zeros, which
// then multiply neighbours in the other. Pixels are the terms of the weights' gradient. Zeros
// around an image may be multiplied too, or left out as in float32.
bool may_have_spread(const ConvGeometry& g, const ConvCall& call) {
  if (g.element_bytes() == sizeof(float)) { return false; }
  const bool whole = g.weights[1] % kProductDepth == 0 && g.weights[2] % kProductDepth == 0;
  std::vector<ConvRole> roles{kConvIn, kConvWeights, kConvOut};
  roles.erase(roles.begin() + call.result);
  if (whole && call.result != kConvWeights) { roles = {kConvWeights}; }
  // Finite operands have nothing to spread, finite results have nothing of it: the fewer are read.
  int64_t operands = 0;
  for (const ConvRole role : roles) { operands += g.count(role); }
  if (g.count(call.result) < operands) { roles = {call.result}; }
  return !std::all_of(roles.begin(), roles.end(),
                      [&](ConvRole role) { return is_finite(g, call, role); });
}

}  // namespace

bool run_primitive(const ConvGeometry& geometry, const ConvCall& call) {
  if (geometry.element_bytes() != sizeof(float) && !has_bfloat16_products()) { return false; }
  const int64_t images = geometry.in[0];
  const int64_t step = images_at_a_time(geometry, call.result);
  ConvGeometry part = geometry;
  ConvCall part_call = call;
  for (int64_t first = 0; first < images; first += step) {
    part.in[0] = part.out[0] = std::min(step, images - first);
    const int64_t skipped = first * geometry.element_bytes();
    part_call.data[kConvIn] = call.tensor<char>(kConvIn) + skipped * geometry.in_image();
    part_call.data[kConvOut] = call.tensor<char>(kConvOut) + skipped * geometry.out_image();
    const ConvPrimitive* primitive = find_primitive(part, part_call);
    if (primitive == nullptr) { return false; }
    primitive->run(part_call);
  }
  return !may_have_spread(geometry, call);
}

}  // namespace oneflow_accel
