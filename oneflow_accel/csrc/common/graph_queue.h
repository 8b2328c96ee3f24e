// Whether an nn.Graph runs now.
#pragma once

namespace oneflow_accel {

// From when OneFlow has entered it into its queue until its job has ended. Always false where the
// queue's calls could not be redirected.
bool a_graph_is_under_way();

}  // namespace oneflow_accel
