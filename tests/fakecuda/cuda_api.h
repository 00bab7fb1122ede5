/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The part of the CUDA driver API that the double offers: types, values and signatures of the
 * documented API (12.x and 13.0), declared here so that the tests build on machines without the
 * toolkit. abi_check.c compares them with cuda.h where there is one.
 *
 * It must not know: how the double works.
 */
#ifndef FAKECUDA_CUDA_API_H
#define FAKECUDA_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

#define FC_API __attribute__((visibility("default")))

typedef enum {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_INVALID_VALUE = 1,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_INVALID_DEVICE = 101,
    CUDA_ERROR_INVALID_IMAGE = 200,
    CUDA_ERROR_INVALID_CONTEXT = 201,
    CUDA_ERROR_INVALID_HANDLE = 400,
    CUDA_ERROR_ILLEGAL_STATE = 401,
    CUDA_ERROR_NOT_FOUND = 500,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_ILLEGAL_ADDRESS = 700,
    CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES = 701,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
    CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE = 708,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_LAUNCH_FAILED = 719,
    CUDA_ERROR_NOT_PERMITTED = 800,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_INVALIDATED = 901,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908,
    CUDA_ERROR_UNKNOWN = 999
} CUresult;

typedef int CUdevice;
typedef unsigned long long CUdeviceptr;
typedef unsigned long long CUmemGenericAllocationHandle;
typedef struct CUctx_st *CUcontext;
typedef struct CUstream_st *CUstream;
typedef struct CUevent_st *CUevent;
typedef struct CUmod_st *CUmodule;
typedef struct CUfunc_st *CUfunction;
typedef struct CUgraph_st *CUgraph;
typedef void (*CUhostFn)(void *user_data);
typedef struct {
    char bytes[16];
} CUuuid;

#define CU_STREAM_LEGACY ((CUstream)0x1)
#define CU_STREAM_PER_THREAD ((CUstream)0x2)
#define CU_DEVICE_CPU (-1)
#define CU_DEVICE_INVALID (-2)

enum { CU_STREAM_DEFAULT = 0, CU_STREAM_NON_BLOCKING = 1 };
enum {
    CU_EVENT_DEFAULT = 0,
    CU_EVENT_BLOCKING_SYNC = 1,
    CU_EVENT_DISABLE_TIMING = 2,
    CU_EVENT_INTERPROCESS = 4
};
enum {
    CU_MEMHOSTALLOC_PORTABLE = 1,
    CU_MEMHOSTALLOC_DEVICEMAP = 2,
    CU_MEMHOSTALLOC_WRITECOMBINED = 4
};
enum {
    CU_MEMHOSTREGISTER_PORTABLE = 1,
    CU_MEMHOSTREGISTER_DEVICEMAP = 2,
    CU_MEMHOSTREGISTER_IOMEMORY = 4,
    CU_MEMHOSTREGISTER_READ_ONLY = 8
};
enum {
    CU_MEMORYTYPE_HOST = 1,
    CU_MEMORYTYPE_DEVICE = 2,
    CU_MEMORYTYPE_ARRAY = 3,
    CU_MEMORYTYPE_UNIFIED = 4
};

typedef enum {
    CU_POINTER_ATTRIBUTE_CONTEXT = 1,
    CU_POINTER_ATTRIBUTE_MEMORY_TYPE = 2,
    CU_POINTER_ATTRIBUTE_DEVICE_POINTER = 3,
    CU_POINTER_ATTRIBUTE_HOST_POINTER = 4,
    CU_POINTER_ATTRIBUTE_SYNC_MEMOPS = 6,
    CU_POINTER_ATTRIBUTE_BUFFER_ID = 7,
    CU_POINTER_ATTRIBUTE_IS_MANAGED = 8,
    CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL = 9,
    CU_POINTER_ATTRIBUTE_RANGE_START_ADDR = 11,
    CU_POINTER_ATTRIBUTE_RANGE_SIZE = 12,
    CU_POINTER_ATTRIBUTE_MAPPED = 13,
    CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES = 14,
    CU_POINTER_ATTRIBUTE_ACCESS_FLAGS = 16,
    CU_POINTER_ATTRIBUTE_MAPPING_SIZE = 18,
    CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR = 19,
    CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID = 20
} CUpointer_attribute;

typedef enum {
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 1,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK = 8,
    CU_DEVICE_ATTRIBUTE_WARP_SIZE = 10,
    CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = 16,
    CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY = 19,
    CU_DEVICE_ATTRIBUTE_PCI_BUS_ID = 33,
    CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID = 34,
    CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR = 39,
    CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT = 40,
    CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING = 41,
    CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID = 50,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = 75,
    CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = 76,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 81,
    CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY = 83,
    CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS = 88,
    CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS = 89,
    CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM = 91,
    CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 97,
    CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED = 99,
    CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 102,
    CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED = 103,
    CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED = 113,
    CU_DEVICE_ATTRIBUTE_NUMA_CONFIG = 130,
    CU_DEVICE_ATTRIBUTE_NUMA_ID = 131,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID = 134,
    CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 141,
    CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED = 145
} CUdevice_attribute;

typedef enum {
    CU_MEM_LOCATION_TYPE_INVALID = 0,
    CU_MEM_LOCATION_TYPE_DEVICE = 1,
    CU_MEM_LOCATION_TYPE_HOST = 2,
    CU_MEM_LOCATION_TYPE_HOST_NUMA = 3,
    CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT = 4
} CUmemLocationType;
enum { CU_MEM_ALLOCATION_TYPE_PINNED = 1 };
enum {
    CU_MEM_HANDLE_TYPE_NONE = 0,
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1,
    CU_MEM_HANDLE_TYPE_FABRIC = 8
};
enum {
    CU_MEM_ACCESS_FLAGS_PROT_NONE = 0,
    CU_MEM_ACCESS_FLAGS_PROT_READ = 1,
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3
};
enum { CU_MEM_ALLOC_GRANULARITY_MINIMUM = 0, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1 };

typedef struct {
    CUmemLocationType type;
    int id;
} CUmemLocation;

typedef struct {
    int type;
    int requestedHandleTypes;
    CUmemLocation location;
    void *win32HandleMetaData;
    struct {
        unsigned char compressionType;
        unsigned char gpuDirectRDMACapable;
        unsigned short usage;
        unsigned char reserved[4];
    } allocFlags;
} CUmemAllocationProp;

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

enum {
    CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1,
    CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL = 2,
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY = 3
};
typedef struct {
    int srcAccessOrder;
    CUmemLocation srcLocHint;
    CUmemLocation dstLocHint;
    unsigned int flags;
} CUmemcpyAttributes;

enum {
    CU_STREAM_CAPTURE_MODE_GLOBAL = 0,
    CU_STREAM_CAPTURE_MODE_THREAD_LOCAL = 1,
    CU_STREAM_CAPTURE_MODE_RELAXED = 2
};
enum {
    CU_STREAM_CAPTURE_STATUS_NONE = 0,
    CU_STREAM_CAPTURE_STATUS_ACTIVE = 1,
    CU_STREAM_CAPTURE_STATUS_INVALIDATED = 2
};
enum {
    CU_GET_PROC_ADDRESS_SUCCESS = 0,
    CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND = 1,
    CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT = 2
};
enum {
    CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK = 0,
    CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES = 1,
    CU_FUNC_ATTRIBUTE_NUM_REGS = 4,
    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
};

typedef struct {
    unsigned int gridDimX, gridDimY, gridDimZ;
    unsigned int blockDimX, blockDimY, blockDimZ;
    unsigned int sharedMemBytes;
    CUstream hStream;
    void *attrs;
    unsigned int numAttrs;
} CUlaunchConfig;

/* How parameters come in through `extra`, as documented for cuLaunchKernel. */
#define CU_LAUNCH_PARAM_END ((void *)0)
#define CU_LAUNCH_PARAM_BUFFER_POINTER ((void *)1)
#define CU_LAUNCH_PARAM_BUFFER_SIZE ((void *)2)

/* Start-up and devices */
FC_API CUresult cuInit(unsigned int flags);
FC_API CUresult cuDriverGetVersion(int *version);
FC_API CUresult cuGetErrorName(CUresult error, const char **text);
FC_API CUresult cuGetErrorString(CUresult error, const char **text);
FC_API CUresult cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags);
FC_API CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version,
                                    uint64_t flags, int *status);
FC_API CUresult cuDeviceGetCount(int *count);
FC_API CUresult cuDeviceGet(CUdevice *device, int ordinal);
FC_API CUresult cuDeviceGetName(char *name, int bytes, CUdevice device);
FC_API CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device);
FC_API CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device);
FC_API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device);
FC_API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device);
FC_API CUresult cuDeviceGetPCIBusId(char *text, int bytes, CUdevice device);
FC_API CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text);
FC_API CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer);

/* Contexts */
FC_API CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device);
FC_API CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
FC_API CUresult cuDevicePrimaryCtxReset_v2(CUdevice device);
FC_API CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active);
FC_API CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags);
FC_API CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device);
FC_API CUresult cuCtxCreate_v4(CUcontext *context, void *params, unsigned int flags,
                               CUdevice device);
FC_API CUresult cuCtxDestroy_v2(CUcontext context);
FC_API CUresult cuCtxPushCurrent_v2(CUcontext context);
FC_API CUresult cuCtxPopCurrent_v2(CUcontext *context);
FC_API CUresult cuCtxSetCurrent(CUcontext context);
FC_API CUresult cuCtxGetCurrent(CUcontext *context);
FC_API CUresult cuCtxGetDevice(CUdevice *device);
FC_API CUresult cuCtxSynchronize(void);
FC_API CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest);
FC_API CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags);
FC_API CUresult cuCtxDisablePeerAccess(CUcontext peer);

/* Memory */
FC_API CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total);
FC_API CUresult cuMemAlloc_v2(CUdeviceptr *address, size_t bytes);
FC_API CUresult cuMemFree_v2(CUdeviceptr address);
FC_API CUresult cuMemAllocManaged(CUdeviceptr *address, size_t bytes, unsigned int flags);
FC_API CUresult cuMemHostAlloc(void **address, size_t bytes, unsigned int flags);
FC_API CUresult cuMemAllocHost_v2(void **address, size_t bytes);
FC_API CUresult cuMemFreeHost(void *address);
FC_API CUresult cuMemHostRegister_v2(void *address, size_t bytes, unsigned int flags);
FC_API CUresult cuMemHostUnregister(void *address);
FC_API CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *host, unsigned int flags);
FC_API CUresult cuMemHostGetFlags(unsigned int *flags, void *address);
FC_API CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute,
                                      CUdeviceptr address);
FC_API CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes,
                                       void **data, CUdeviceptr address);
FC_API CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute,
                                      CUdeviceptr address);
FC_API CUresult cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *bytes, CUdeviceptr address);
FC_API CUresult cuMemGetHandleForAddressRange(void *handle, CUdeviceptr address, size_t bytes,
                                              int type, unsigned long long flags);

/* Virtual memory management */
FC_API CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                              int option);
FC_API CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size,
                            const CUmemAllocationProp *prop, unsigned long long flags);
FC_API CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
FC_API CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address);
FC_API CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop,
                                                       CUmemGenericAllocationHandle handle);
FC_API CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                             int type, unsigned long long flags);
FC_API CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle,
                                               void *shareable, int type);
FC_API CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment,
                                    CUdeviceptr hint, unsigned long long flags);
FC_API CUresult cuMemAddressFree(CUdeviceptr address, size_t size);
FC_API CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset,
                         CUmemGenericAllocationHandle handle, unsigned long long flags);
FC_API CUresult cuMemUnmap(CUdeviceptr address, size_t size);
FC_API CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *desc,
                               size_t count);
FC_API CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location,
                               CUdeviceptr address);

/* Streams, events, capture */
FC_API CUresult cuStreamCreate(CUstream *stream, unsigned int flags);
FC_API CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority);
FC_API CUresult cuStreamDestroy_v2(CUstream stream);
FC_API CUresult cuStreamQuery(CUstream stream);
FC_API CUresult cuStreamSynchronize(CUstream stream);
FC_API CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags);
FC_API CUresult cuStreamGetCtx(CUstream stream, CUcontext *context);
FC_API CUresult cuStreamGetPriority(CUstream stream, int *priority);
FC_API CUresult cuStreamGetFlags(CUstream stream, unsigned int *flags);
FC_API CUresult cuLaunchHostFunc(CUstream stream, CUhostFn function, void *user_data);
FC_API CUresult cuEventCreate(CUevent *event, unsigned int flags);
FC_API CUresult cuEventDestroy_v2(CUevent event);
FC_API CUresult cuEventRecord(CUevent event, CUstream stream);
FC_API CUresult cuEventQuery(CUevent event);
FC_API CUresult cuEventSynchronize(CUevent event);
FC_API CUresult cuEventElapsedTime(float *ms, CUevent start, CUevent end);
FC_API CUresult cuEventElapsedTime_v2(float *ms, CUevent start, CUevent end);
FC_API CUresult cuThreadExchangeStreamCaptureMode(int *mode);
FC_API CUresult cuStreamBeginCapture_v2(CUstream stream, int mode);
FC_API CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph);
FC_API CUresult cuStreamIsCapturing(CUstream stream, int *status);
FC_API CUresult cuGraphDestroy(CUgraph graph);

/* Copies */
FC_API CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t bytes);
FC_API CUresult cuMemcpyAsync(CUdeviceptr to, CUdeviceptr from, size_t bytes, CUstream stream);
FC_API CUresult cuMemcpyHtoD_v2(CUdeviceptr to, const void *from, size_t bytes);
FC_API CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes,
                                     CUstream stream);
FC_API CUresult cuMemcpyDtoH_v2(void *to, CUdeviceptr from, size_t bytes);
FC_API CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream stream);
FC_API CUresult cuMemcpyDtoD_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes);
FC_API CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr to, CUdeviceptr from, size_t bytes,
                                     CUstream stream);
FC_API CUresult cuMemsetD8_v2(CUdeviceptr to, unsigned char value, size_t bytes);
FC_API CUresult cuMemsetD8Async(CUdeviceptr to, unsigned char value, size_t bytes, CUstream stream);
FC_API CUresult cuMemcpyBatchAsync(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes, size_t count,
                                   CUmemcpyAttributes *attrs, size_t *attr_indexes,
                                   size_t attr_count, size_t *fail_index, CUstream stream);
FC_API CUresult cuMemcpyBatchAsync_v2(CUdeviceptr *to, CUdeviceptr *from, size_t *sizes,
                                      size_t count, CUmemcpyAttributes *attrs, size_t *attr_indexes,
                                      size_t attr_count, CUstream stream);

/* Modules and kernels */
FC_API CUresult cuModuleLoadData(CUmodule *module, const void *image);
FC_API CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count,
                                   int *options, void **values);
FC_API CUresult cuModuleUnload(CUmodule module);
FC_API CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
FC_API CUresult cuFuncSetAttribute(CUfunction function, int attribute, int value);
FC_API CUresult cuFuncGetAttribute(int *value, int attribute, CUfunction function);
FC_API CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function,
                                                            int threads, size_t shared_bytes);
FC_API CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *threads, CUfunction function,
                                                 void *to_shared, size_t shared_bytes, int limit);
FC_API CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                               unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                               unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                               void **params, void **extra);
FC_API CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params,
                                 void **extra);

#endif
