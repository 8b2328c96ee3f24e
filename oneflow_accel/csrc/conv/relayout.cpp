#include "conv/relayout.h"

#include "conv/pack_weights.h"

namespace oneflow_accel {

namespace {

dnnl::reorder::primitive_desc reorder_desc(const dnnl::memory::desc& from,
                                           const dnnl::memory::desc& to) {
  return dnnl::reorder::primitive_desc(cpu_engine(), from, cpu_engine(), to,
                                       user_scratchpad_attr());
}

void execute(const dnnl::reorder& reorder, const dnnl::memory::desc& scratchpad,
             dnnl::memory& from, dnnl::memory& to) {
  reorder.execute(cpu_stream(), {{DNNL_ARG_FROM, from},
                                 {DNNL_ARG_TO, to},
                                 {DNNL_ARG_SCRATCHPAD, scratchpad_memory(scratchpad)}});
}

}  // namespace

InputLayout::InputLayout(const dnnl::memory::desc& plain, const dnnl::memory::desc& inner,
                         ScratchSlot slot)
    : plain_(plain), inner_(inner), slot_(slot) {
  if (plain_ == inner_) { return; }
  packed_by_us_ = can_pack_weights(plain_, inner_);
  if (packed_by_us_) { return; }
  const auto desc = reorder_desc(plain_, inner_);
  reorder_ = dnnl::reorder(desc);
  scratchpad_ = desc.scratchpad_desc();
}

dnnl::memory InputLayout::load(const void* data) const {
  if (is_plain()) { return wrap(plain_, data); }
  void* inner = scratch(slot_, inner_.get_size());
  copy(data, inner);
  return wrap(inner_, inner);
}

void InputLayout::copy(const void* data, void* inner) const {
  if (packed_by_us_) {
    pack_weights(inner_, static_cast<const float*>(data), static_cast<float*>(inner));
    return;
  }
  auto from = wrap(plain_, data);
  auto to = wrap(inner_, inner);
  execute(reorder_, scratchpad_, from, to);
}

OutputLayout::OutputLayout(const dnnl::memory::desc& plain, const dnnl::memory::desc& inner,
                           ScratchSlot slot)
    : plain_(plain), inner_(inner), slot_(slot) {
  if (plain_ == inner_) { return; }
  const auto desc = reorder_desc(inner_, plain_);
  reorder_ = dnnl::reorder(desc);
  scratchpad_ = desc.scratchpad_desc();
}

dnnl::memory OutputLayout::target(void* data) const {
  return plain_ == inner_ ? wrap(plain_, data)
                          : wrap(inner_, scratch(slot_, inner_.get_size()));
}

void OutputLayout::store(dnnl::memory& written, void* data) const {
  if (plain_ == inner_) { return; }
  auto to = wrap(plain_, data);
  execute(reorder_, scratchpad_, written, to);
}

}  // namespace oneflow_accel
