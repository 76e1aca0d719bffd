// The CUDA half of ops/cache_records/cache_records.h. Arguments have been validated.
#pragma once

#include "ops/cache_records/cache_records.h"

namespace deepinfer::cuda {

Status WindowRecords(const WindowRecordsArgs& args, Stream& stream);
Status WriteWindowPages(const WriteWindowPagesArgs& args, Stream& stream);
Status WriteEntries(const WriteEntriesArgs& args, Stream& stream);

}  // namespace deepinfer::cuda
