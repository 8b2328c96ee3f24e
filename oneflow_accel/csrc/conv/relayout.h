// Tensors between OneFlow's layout and the one that a primitive chose.
#pragma once

#include "common/onednn.h"

namespace oneflow_accel {

// A primitive's input. Copied into a scratch buffer where the layouts differ.
class InputLayout {
 public:
  InputLayout(const dnnl::memory::desc& plain, const dnnl::memory::desc& inner, ScratchSlot slot);

  // What the primitive reads; valid until the thread uses the slot again.
  dnnl::memory load(const void* data) const;

  // The primitive's layout, whether it is OneFlow's too, and a copy in it to memory of its size.
  const dnnl::memory::desc& inner() const { return inner_; }
  bool is_plain() const { return plain_ == inner_; }
  void copy(const void* data, void* inner) const;

 private:
  dnnl::memory::desc plain_;
  dnnl::memory::desc inner_;
  ScratchSlot slot_;
  bool packed_by_us_ = false;
  dnnl::reorder reorder_;
  dnnl::memory::desc scratchpad_;
};

// A primitive's output. Written to a scratch buffer first where the layouts differ.
class OutputLayout {
 public:
  OutputLayout(const dnnl::memory::desc& plain, const dnnl::memory::desc& inner, ScratchSlot slot);

  // What the primitive writes; valid until the thread uses the slot again.
  dnnl::memory target(void* data) const;

  // Called after the primitive has run: `written` is what target() gave.
  void store(dnnl::memory& written, void* data) const;

 private:
  dnnl::memory::desc plain_;
  dnnl::memory::desc inner_;
  ScratchSlot slot_;
  dnnl::reorder reorder_;
  dnnl::memory::desc scratchpad_;
};

}  // namespace oneflow_accel
