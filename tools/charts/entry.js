// What the pages of `inspect --html`, `verify --html` and `report` use of Apache ECharts.
import * as echarts from "echarts/core";
import { HeatmapChart, LineChart, TreemapChart } from "echarts/charts";
import { GridComponent, TooltipComponent, VisualMapComponent } from "echarts/components";
import { SVGRenderer } from "echarts/renderers";

echarts.use([HeatmapChart, LineChart, TreemapChart, GridComponent, TooltipComponent, VisualMapComponent, SVGRenderer]);
globalThis.echarts = echarts;
