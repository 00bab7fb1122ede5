/* SPDX-License-Identifier: Apache-2.0 */
/* Inside transport/: the copy kernel as PTX text (gather.ptx, compiled from gather.cu),
 * NUL-terminated. */
#ifndef TIDEPOOL_GATHER_PTX_H
#define TIDEPOOL_GATHER_PTX_H

extern const char tp_gather_ptx[];

#endif
