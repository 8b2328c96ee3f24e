// The oneflow 0.9.0 wheel ships glog's logging.h without this header. The wheel exists for
// Linux only, so there is one platform to name.
#pragma once

#define OS_LINUX
