// The oneflow 0.9.0 wheel ships glog's logging.h without this header. These are the
// constants that logging.h needs, with glog's published values.
#pragma once

typedef int LogSeverity;

const int GLOG_INFO = 0;
const int GLOG_WARNING = 1;
const int GLOG_ERROR = 2;
const int GLOG_FATAL = 3;
const int NUM_SEVERITIES = 4;

#ifndef GLOG_NO_ABBREVIATED_SEVERITIES
const int INFO = GLOG_INFO;
const int WARNING = GLOG_WARNING;
const int ERROR = GLOG_ERROR;
const int FATAL = GLOG_FATAL;
#endif

#ifdef NDEBUG
#define DFATAL_LEVEL ERROR
#else
#define DFATAL_LEVEL FATAL
#endif
