// The job of `deepinfer generate --input`: lines in, results out, in bounded memory. Results go to
// a journal (apps/journal.h) as they are finished and to the output at the end, or, when the output
// is a stream, to it in input order. docs/generate.md is the contract.
#pragma once

#include "apps/generate.h"
#include "deepinfer/sampling_params.h"

namespace deepinfer {

// The seed of a line that does not give one. A function of the job and the line, so that a job that
// was interrupted gives the same results as one that was not.
uint64_t LineSeed(uint64_t job_seed, int64_t line);

// Loads the model and runs the job. Returns the exit status.
int RunGenerateJob(const GenerateOptions& options, const SamplingParams& defaults);

}  // namespace deepinfer
